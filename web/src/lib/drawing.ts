import { sharp } from "./sharp.svelte";

/** Where something lies on a drawing: pointers are told in the window's pixels, and a drawing may be shown smaller than it was drawn. */

export interface Place {
  x: number;
  y: number;
}

/** Cells side by side: where the first begins, how large each is, and how many there are. */
export interface Cells {
  left: number;
  top: number;
  wide: number;
  high: number;
  rows: number;
  cols: number;
}

/** The place of a pointer on a drawing of this size, which fills this box of the window. */
export function drawnAt(
  pointer: { clientX: number; clientY: number },
  box: { left: number; top: number; width: number; height: number },
  size: { width: number; height: number },
): Place {
  return {
    x: ((pointer.clientX - box.left) * size.width) / (box.width || 1),
    y: ((pointer.clientY - box.top) * size.height) / (box.height || 1),
  };
}

/** The cell at a place; beside all cells there is none. */
export function cellAt(place: Place, cells: Cells): { row: number; col: number } | null {
  const col = Math.floor((place.x - cells.left) / cells.wide);
  const row = Math.floor((place.y - cells.top) / cells.high);
  return row >= 0 && row < cells.rows && col >= 0 && col < cells.cols ? { row, col } : null;
}

/** A canvas of this size in CSS pixels, empty, as sharp as the screen; what is drawn on it is told in CSS pixels too. */
export function sized(canvas: HTMLCanvasElement, size: { width: number; height: number }): CanvasRenderingContext2D | undefined {
  const context = canvas.getContext("2d");
  if (!context) return undefined;
  const { value: scale } = sharp;
  canvas.width = Math.round(size.width * scale);
  canvas.height = Math.round(size.height * scale);
  canvas.style.width = `${size.width}px`;
  canvas.style.height = `${size.height}px`;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}
