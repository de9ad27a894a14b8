/** Something long whose answer comes in parts: it can be stopped, and is stopped when what it was about has changed or gone. */

export class Job<T> {
  state = $state<"idle" | "running" | "done" | "stopped" | "failed">("idle");
  parts = $state.raw<readonly T[]>([]);
  error = $state.raw<unknown>();
  #control: AbortController | undefined;

  /** Begin anew; what has come before goes. */
  async start(run: (take: (part: T) => void, signal: AbortSignal) => Promise<void>): Promise<void> {
    this.#control?.abort();
    const control = new AbortController();
    this.#control = control;
    this.state = "running";
    this.parts = [];
    this.error = undefined;
    const isMine = (): boolean => this.#control === control;
    try {
      await run((part) => {
        if (isMine()) this.parts = [...this.parts, part];
      }, control.signal);
      if (isMine()) this.state = "done";
    } catch (error) {
      if (!isMine()) return;
      this.state = control.signal.aborted ? "stopped" : "failed";
      this.error = control.signal.aborted ? undefined : error;
    }
  }

  /** Stop; what has come stays. */
  stop(): void {
    this.#control?.abort();
  }

  /** Stop, and forget what has come. */
  clear(): void {
    this.#control?.abort();
    this.#control = undefined;
    this.state = "idle";
    this.parts = [];
    this.error = undefined;
  }
}
