/** Where the names of points stand in a drawing: none over another, nor over a point; what finds no place is left out. */

export interface Label {
  readonly x: number;
  readonly y: number;
  readonly anchor: "start" | "middle" | "end";
}

interface Box {
  readonly left: number;
  readonly right: number;
  readonly top: number;
  readonly bottom: number;
}

const [LETTER, HIGH, APART] = [8, 14, 8] as const; // px of a letter in the drawing's font, of a line, and between a point and its name

/** Labels for points in the order of their importance; `width` is the drawing's. */
export function labelsOf(points: readonly { x: number; y: number; text: string }[], width: number): (Label | undefined)[] {
  const taken: Box[] = points.map(({ x, y }) => ({ left: x - 4, right: x + 4, top: y - 4, bottom: y + 4 }));
  return points.map(({ x, y, text }, i) => {
    const wide = LETTER * [...text].length;
    const options: readonly (readonly [Label, left: number])[] = [
      [{ x, y: y - APART, anchor: "middle" }, x - wide / 2], [{ x, y: y + APART + HIGH - 4, anchor: "middle" }, x - wide / 2],
      [{ x: x + APART, y: y + 4, anchor: "start" }, x + APART], [{ x: x - APART, y: y + 4, anchor: "end" }, x - APART - wide],
    ];
    for (const [label, left] of options) {
      const box = { left, right: left + wide, top: label.y - HIGH + 2, bottom: label.y + 3 };
      if (left < 0 || box.right > width || taken.some((other, j) => j !== i && isOver(box, other))) continue;
      taken.push(box);
      return label;
    }
    return undefined;
  });
}

const isOver = (a: Box, b: Box): boolean => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
