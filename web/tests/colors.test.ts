/** The one table of colours: what stands beside each other is told apart by every eye, light and dark. */
import { describe, expect, test } from "vitest";
import { color } from "../src/lib/colors";
import { HEADS, INKS } from "../src/scene/marks/look";

type Vector = readonly [number, number, number];
type Matrix = readonly [Vector, Vector, Vector];

const THEMES = ["light", "dark"] as const;
const LEAST = 0.09; // of OKLab: 0.02 is just seen where two areas touch

/** Source: Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009, severity 1.0; for linear RGB. */
const EYES: Readonly<Record<string, Matrix>> = {
  usual: [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
  protanopia: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deuteranopia: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  tritanopia: [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
};

const times = (matrix: Matrix, [x, y, z]: Vector): Vector => matrix.map(([a, b, c]) => a * x + b * y + c * z) as unknown as Vector;
const each = (of: Vector, change: (one: number) => number): Vector => of.map(change) as unknown as Vector;

function linear(hex: string): Vector {
  const rgb = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255) as unknown as Vector;
  return each(rgb, (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
}

/** Source: Ottosson, "A perceptual color space for image processing", 2020. */
function oklab(rgb: Vector): Vector {
  const lms = times([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566], [0.0883024619, 0.2817188376, 0.6299787005]], rgb);
  return times([[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099], [0.0259040371, 0.7827717662, -0.808675766]], each(lms, Math.cbrt));
}

/** How far two colours are apart for the eye that tells them apart least. */
function apart(one: string, other: string): number {
  const seen = Object.values(EYES).map((eye) => {
    const [a, b] = [one, other].map((hex) => oklab(each(times(eye, linear(hex)), (part) => Math.min(1, Math.max(0, part))))) as [Vector, Vector];
    return Math.hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]);
  });
  return Math.min(...seen);
}

const hex = (rgb: Vector): string => `#${rgb.map((part) => part.toString(16).padStart(2, "0")).join("")}`;

describe.each(THEMES)("%s", (theme) => {
  const inks = INKS[theme];
  const heads = HEADS[theme];

  test.each([
    ["attention", "mlp"], ["negative", "positive"], ["says", "chosen"], ["says", "mlp"], ["says", "attention"], ["stream", "attention"], ["stream", "mlp"],
    ["stream", "says"], ["key", "value"], ["key", "says"], ["attention", "key"], ["attention", "value"],
  ] as const)("%s and %s", (one, other) => {
    expect(apart(inks[one], inks[other])).toBeGreaterThan(LEAST);
  });

  test("the ends of the scale of signs, and its middle", () => {
    const at = (place: number): string => hex(color("signed", theme === "dark", place));
    for (const [one, other] of [[0, 1], [0, 0.5], [0.5, 1]] as const) expect(apart(at(one), at(other))).toBeGreaterThan(LEAST);
  });

  test("no head has the MLP's colour", () => {
    for (const head of heads) expect(apart(head, inks.mlp)).toBeGreaterThan(LEAST);
  });

  test("heads that stand beside each other: neighbours, the last and the first, and the first four with each other", () => {
    for (const [i, head] of heads.entries()) {
      if (i > 0) expect(apart(head, heads[i - 1] as string)).toBeGreaterThan(LEAST);
      if (i > 0) expect(apart(head, heads[0] as string)).toBeGreaterThan(LEAST);
      for (const other of heads.slice(0, Math.min(i, 4))) if (i < 4) expect(apart(head, other)).toBeGreaterThan(LEAST);
    }
  });

  test("lines and letters stand out from the paper", () => {
    const light = (one: string): number => linear(one).reduce((sum, part, i) => sum + part * ([0.2126, 0.7152, 0.0722][i] as number), 0);
    const contrast = (one: string): number => {
      const [a, b] = [light(one), light(inks.paper)].sort((x, y) => y - x) as [number, number];
      return (a + 0.05) / (b + 0.05);
    };
    for (const ink of ["ink", "soft"] as const) expect(contrast(inks[ink])).toBeGreaterThan(4.5);
    for (const one of [...heads, inks.says, inks.attention, inks.mlp, inks.negative, inks.positive]) expect(contrast(one)).toBeGreaterThan(2.5);
  });
});
