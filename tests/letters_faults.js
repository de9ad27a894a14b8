// What is written on the page and lies over something else, or is cut: of the DOM with its drawings, and of canvases.
() => {
  const SLACK = 2; // pixels
  const SKIPPED = ".katex, .hidden, script, style, textarea, option, [inert], title";
  const faults = new Set();

  const named = ({ text, left, top, right, bottom }) => {
    const [x, y, width, height] = [left, top, right - left, bottom - top].map(Math.round);
    return `“${text.trim().slice(0, 40)}” at ${x},${y} of ${width}x${height}`;
  };
  const within = (box, clip) => ({
    ...box,
    left: Math.max(box.left, clip.left),
    right: Math.min(box.right, clip.right),
    top: Math.max(box.top, clip.top),
    bottom: Math.min(box.bottom, clip.bottom),
  });
  const isEmpty = (box) => box.right - box.left < 1 || box.bottom - box.top < 1;
  const beyond = (box, clip) =>
    Math.max(clip.left - box.left, box.right - clip.right, clip.top - box.top, box.bottom - clip.bottom);

  function overlaps(boxes, where) {
    const sorted = boxes.toSorted((a, b) => a.top - b.top);
    sorted.forEach((a, i) => {
      for (let j = i + 1; j < sorted.length && sorted[j].top < a.bottom; j++) {
        const b = sorted[j];
        const shared = within(a, b);
        const isOver = shared.right - shared.left > SLACK && shared.bottom - shared.top > SLACK;
        if (a.node !== b.node && isOver) faults.add(`${where}: ${named(a)} over ${named(b)}`);
      }
    });
  }

  // A line's box is higher than its letters.
  function lettersOf(rect, node) {
    const { parentElement: parent } = node;
    const free = Math.max(0, (rect.height - parseFloat(getComputedStyle(parent).fontSize)) / 2);
    const inset = parent.closest("svg") ? 0.18 * rect.height : free;
    const { left, right } = rect;
    return { text: node.data, node, left, right, top: rect.top + inset, bottom: rect.bottom - inset };
  }

  // What of a line is seen, after all that clips it; what is scrolled away is not cut.
  function seen(box) {
    let scrolls = false;
    for (let one = box.node.parentElement; one && one !== document.documentElement; one = one.parentElement) {
      const style = getComputedStyle(one);
      if (style.clipPath.startsWith("inset(50%")) return undefined; // for screen readers
      if (style.position === "fixed" && style.backgroundColor !== "rgba(0, 0, 0, 0)") return undefined; // floats, for a while
      if (style.overflowX === "visible" && style.overflowY === "visible") continue;
      if (one instanceof SVGElement && one.ownerSVGElement) continue;
      const clip = one.getBoundingClientRect();
      if (/auto|scroll/.test(style.overflowX + style.overflowY)) {
        scrolls = true;
        box = within(box, clip);
        if (isEmpty(box)) return undefined;
      } else if (!scrolls && style.textOverflow !== "ellipsis" && beyond(box, clip) > SLACK) {
        faults.add(`cut by ${one.tagName.toLowerCase()}.${[...one.classList].join(".")}: ${named(box)}`);
      }
    }
    const width = document.documentElement.clientWidth;
    if (box.right < -1000) return undefined; // a link that skips, until it has the focus
    const isOut = box.left < -SLACK || box.right > width + SLACK;
    if (!scrolls && isOut) faults.add(`out of the window: ${named(box)}`);
    return box;
  }

  const boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest(SKIPPED)) continue;
    const isVisible = parent.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
    if (!isVisible) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      const box = rect.width < 1 || rect.height < 1 ? undefined : seen(lettersOf(rect, node));
      if (box) boxes.push(box);
    }
  }
  overlaps(boxes, "text");

  for (const canvas of document.querySelectorAll("canvas")) {
    const size = canvas.getBoundingClientRect();
    if (!canvas.labels?.length || !size.width || !canvas.checkVisibility()) continue;
    const scale = size.width / canvas.width;
    const whole = { left: 0, top: 0, right: size.width, bottom: size.height };
    const labels = canvas.labels
      .map(({ text, left, right, top, bottom }, node) => {
        return { text, node, left: left * scale, right: right * scale, top: top * scale, bottom: bottom * scale };
      })
      .filter((box) => !isEmpty(within(box, whole)));
    for (const box of labels) if (beyond(box, whole) > SLACK) faults.add(`cut by the canvas: ${named(box)}`);
    overlaps(labels, "canvas");
  }
  return [...faults];
}
