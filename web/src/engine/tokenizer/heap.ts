/** Numbers, the least first. */
export class Heap {
  private readonly all: number[] = [];

  get size(): number {
    return this.all.length;
  }

  push(value: number): void {
    const { all } = this;
    let at = all.push(value) - 1;
    for (let above = (at - 1) >> 1; at > 0 && (all[above] as number) > value; above = (at - 1) >> 1) {
      all[at] = all[above] as number;
      at = above;
    }
    all[at] = value;
  }

  pop(): number {
    const { all } = this, least = all[0] as number, last = all.pop() as number;
    if (all.length === 0) return least;
    let at = 0;
    for (let below = 1; below < all.length; below = 2 * at + 1) {
      if (below + 1 < all.length && (all[below + 1] as number) < (all[below] as number)) below++;
      if ((all[below] as number) >= last) break;
      all[at] = all[below] as number;
      at = below;
    }
    all[at] = last;
    return least;
  }
}
