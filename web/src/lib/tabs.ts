/**
 * The key among the tabs of one address: a tab without one, or with one that is refused, asks the others, and a tab that has got one tells
 * them. A channel reaches pages of the same scheme, host and port alone; cookies would reach those of all ports.
 */

const CHANNEL = "llamarium-key";
const KEY = /^[\x21-\x7e]{1,512}$/;

type Message = { readonly kind: "ask" } | { readonly kind: "key"; readonly key: string };

export interface Hearing {
  /** The key of this tab, if the server has taken it. */
  mine(): string | undefined;
  /** Another tab has this key. */
  told(key: string): void;
}

export class Tabs {
  readonly #channel: BroadcastChannel | undefined;

  constructor(hearing: Hearing) {
    if (!("BroadcastChannel" in globalThis)) return;
    this.#channel = new BroadcastChannel(CHANNEL);
    this.#channel.onmessage = ({ data }: MessageEvent<Partial<Message> | null>) => {
      const mine = hearing.mine();
      if (data?.kind === "ask" && mine !== undefined) this.tell(mine);
      if (data?.kind === "key" && typeof data.key === "string" && KEY.test(data.key)) hearing.told(data.key);
    };
  }

  /** Ask the other tabs for a key; one that has it tells. */
  ask(): void {
    this.#channel?.postMessage({ kind: "ask" } satisfies Message);
  }

  close(): void {
    this.#channel?.close();
  }

  tell(key: string): void {
    this.#channel?.postMessage({ kind: "key", key } satisfies Message);
  }
}
