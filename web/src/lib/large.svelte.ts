/** Large type, for a projector: everything is half as large again (`app.css`). A lesson may ask for it; the header's button changes it. */
class Large {
  #isOn = $state(false);

  get isOn(): boolean {
    return this.#isOn;
  }

  set isOn(isOn: boolean) {
    this.#isOn = isOn;
    document.documentElement.toggleAttribute("data-large", isOn);
  }

  /** How many pixels of the window a CSS pixel of the page is wide, where there is room for large type. */
  get zoom(): number {
    return this.#isOn && matchMedia("(min-width: 62rem)").matches ? 1.5 : 1;
  }
}

export const large = new Large();
