/**
 * What is being typed and has not been asked yet. It begins as its field says, and anew when the field comes to say something else, as
 * another link may; what else the link holds may change meanwhile.
 */
export class Draft {
  readonly #of: () => string;
  readonly #given: string = $derived.by(() => this.#of());
  text: string = $derived(this.#given);

  constructor(of: () => string) {
    this.#of = of;
  }
}
