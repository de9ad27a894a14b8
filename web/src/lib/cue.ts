/** What is wider than its place says so: the side that goes on fades (`app.css`, `[data-goes-on]`). `{@attach goesOn}` on what scrolls. */
export function goesOn(place: HTMLElement): () => void {
  const look = (): void => {
    const { scrollLeft, scrollWidth, clientWidth } = place;
    const sides = [scrollLeft > 1 ? "left" : "", scrollLeft + clientWidth < scrollWidth - 1 ? "right" : ""];
    place.dataset.goesOn = sides.join(" ").trim();
  };
  const sized = new ResizeObserver(look);
  sized.observe(place);
  for (const one of place.children) sized.observe(one);
  place.addEventListener("scroll", look, { passive: true });
  look();
  return () => {
    sized.disconnect();
    place.removeEventListener("scroll", look);
  };
}
