/** What a view shows, as a file: pictures of what is drawn, numbers as they are. Nothing leaves the page but to the reader's disk. */

import { sharp } from "./sharp.svelte";

/** A name of a file: letters and digits of what it is. */
export function fileName(what: string, ending: string): string {
  const plain = what.normalize("NFKD").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  return `llamarium-${plain.slice(0, 60).replace(/-$/, "") || "view"}.${ending}`;
}

export function download(blob: Blob, name: string): void {
  const address = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** What the colours of a picture mean. */
interface ColorScale {
  label: string;
  low: string;
  high: string;
  /** 256 colours of four bytes, from low to high. */
  colors: Uint8ClampedArray;
  note?: string;
}

const FOOT = 44; // px below a picture, where its name and its colours stand
const LEAST = 360; // px of a picture's width, so that these have room

/** Canvases one over the other, on the page's colour (alone they would be light names on nothing), and below them what the colours mean. */
export function png(layers: readonly HTMLCanvasElement[], colors: ColorScale): Promise<Blob | null> {
  const [first] = layers;
  const { value: scale } = sharp;
  const copy = document.createElement("canvas");
  copy.width = Math.max(first?.width ?? 0, LEAST * scale);
  copy.height = (first?.height ?? 0) + FOOT * scale;
  const context = copy.getContext("2d");
  if (first && context) {
    context.fillStyle = paper(first);
    context.fillRect(0, 0, copy.width, copy.height);
    for (const layer of layers) context.drawImage(layer, 0, 0);
    context.setTransform(scale, 0, 0, scale, 0, first.height);
    context.fillStyle = getComputedStyle(first).color;
    drawScale(context, colors, copy.width / scale);
  }
  return new Promise((done) => copy.toBlob(done, "image/png"));
}

/** Draw a line with the picture's name, and one with its colours and the numbers at their ends. */
function drawScale(context: CanvasRenderingContext2D, { label, low, high, colors, note = "" }: ColorScale, width: number): void {
  context.font = '12px system-ui, "DejaVu Sans", sans-serif';
  context.textBaseline = "middle";
  context.fillText(label, 4, 14, width - 8);
  context.fillText(low, 4, 32);
  const from = 10 + context.measureText(low).width;
  const ramp = new OffscreenCanvas(256, 1);
  const image = new ImageData(256, 1);
  image.data.set(colors);
  ramp.getContext("2d")?.putImageData(image, 0, 0);
  context.drawImage(ramp, from, 27, 90, 10);
  context.fillText([high, note].filter(Boolean).join("; "), from + 96, 32, width - from - 100);
}

const LOOKS = [
  "fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity", "font-family", "font-size", "font-weight",
  "text-anchor", "dominant-baseline",
];

/** A drawing that stands alone: its colours and letters are written into it, since the page's style sheet stays here. */
export function svg(drawn: SVGSVGElement): Blob {
  const copy = drawn.cloneNode(true) as SVGSVGElement;
  const inside = [drawn, ...drawn.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((one, i) => {
    const look = getComputedStyle(inside[i] as Element);
    for (const name of LOOKS) one.setAttribute(name, look.getPropertyValue(name));
    one.removeAttribute("class");
    one.removeAttribute("style");
  });
  const { width, height } = drawn.getBoundingClientRect();
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", String(width));
  copy.setAttribute("height", String(height));
  const back = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  back.setAttribute("width", "100%");
  back.setAttribute("height", "100%");
  back.setAttribute("fill", paper(drawn));
  copy.prepend(back);
  return new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
}

/** Numbers as JSON: arrays as lists; what is not finite is null, as in the library's own `to_dict`. */
export function json(value: unknown): Blob {
  const text = JSON.stringify(value, (_, one: unknown) => (ArrayBuffer.isView(one) ? Array.from(one as Float32Array) : one), 1);
  return new Blob([text, "\n"], { type: "application/json" });
}

function paper(one: Element): string {
  return getComputedStyle(one.ownerDocument.documentElement).backgroundColor;
}
