// Runs before the page's own scripts: a canvas then says what is written on it, each text with its box, until it is cleared.
(() => {
  const canvas = HTMLCanvasElement.prototype;
  const context = CanvasRenderingContext2D.prototype;
  const { fillText, clearRect } = context;

  context.clearRect = function (x, y, width, height) {
    if (width >= this.canvas.clientWidth) this.canvas.labels = [];
    return clearRect.call(this, x, y, width, height);
  };

  for (const name of ["width", "height"]) {
    const { get, set } = Object.getOwnPropertyDescriptor(canvas, name);
    Object.defineProperty(canvas, name, {
      get,
      set(value) {
        this.labels = []; // a canvas that gets a size is empty
        set.call(this, value);
      },
      configurable: true,
      enumerable: true,
    });
  }

  context.fillText = function (text, x, y, ...most) {
    fillText.call(this, text, x, y, ...most);
    if (this.globalAlpha <= 0.3 || !text.trim()) return;
    const size = this.measureText(text);
    const squeezed = most.length ? Math.min(1, most[0] / size.width) : 1;
    const sides = [-size.actualBoundingBoxLeft * squeezed, size.actualBoundingBoxRight * squeezed];
    const ends = [-size.actualBoundingBoxAscent, size.actualBoundingBoxDescent];
    const at = this.getTransform();
    const corners = sides.flatMap((dx) => ends.map((dy) => at.transformPoint({ x: x + dx, y: y + dy })));
    const [xs, ys] = [corners.map((one) => one.x), corners.map((one) => one.y)];
    const box = { left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys) };
    (this.canvas.labels ??= []).push({ text, ...box });
  };
})();
