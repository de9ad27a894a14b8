import { untrack } from "svelte";

/** How many answers the page waits for; while there are any, what stands in a stage may be of an earlier question. */
export const pending = $state({ count: 0 });

/** The same as a plain number: where an effect ends, Svelte reads states as they were before. */
let waiting = 0;

/** One more is waited for, or one less. */
export function wait(by: 1 | -1): void {
  waiting += by;
  pending.count = waiting;
}

const asked = $state({ times: 0 });

/** How many models have answered. */
let models = 0;

/** Ask for everything again that is shown: the server answers once more. What is kept costs nothing. */
export function renew(): void {
  asked.times++;
}

/** Ask for everything again, of another model: what is shown is not its, and goes. */
export function forget(): void {
  models++;
  renew();
}

/**
 * Something that is asked for, and asked for again when what it depends on changes. What was there stays until then, so that nothing
 * jumps, unless it is of another model; the stage is marked as busy meanwhile.
 */
export class Resource<T> {
  value = $state.raw<T | undefined>();
  error = $state.raw<unknown>();
  loading = $state(false);
  #turn = $state(0);
  #models = models;

  /** `ask` reads what it depends on before its first await, and returns null where there is nothing to ask for. */
  constructor(ask: () => Promise<T> | null) {
    $effect(() => {
      void this.#turn;
      void asked.times;
      const answer = ask();
      let isCurrent = true;
      let isWaiting = answer !== null;
      untrack(() => {
        if (isWaiting) wait(1);
        if (!isWaiting || this.#models !== models) this.value = this.error = undefined;
        this.#models = models;
        this.loading = isWaiting;
      });
      const end = (): void => {
        if (isWaiting) wait(-1);
        isWaiting = false;
      };
      const take = (value: T | undefined, error: unknown): void => {
        if (!isCurrent) return;
        this.value = value;
        this.error = error;
        this.loading = false;
        end();
      };
      answer?.then(
        (value) => take(value, undefined),
        (error: unknown) => take(undefined, error),
      );
      return () => {
        isCurrent = false;
        untrack(end);
      };
    });
  }

  retry(): void {
    this.#turn++;
  }
}
