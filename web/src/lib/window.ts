/** Some neighbours of many: all are too many to be drawn, or to be asked for. */
export interface Window {
  start: number;
  /** Behind the last. */
  stop: number;
}

/** At most so many, around one of them; near the ends there are more on the other side. */
export function around(at: number, total: number, most: number): Window {
  const start = Math.max(0, Math.min(at - Math.floor(most / 2), total - most));
  return { start, stop: Math.min(total, start + most) };
}
