import { field } from "./field";
import { session } from "./session.svelte";

const NAMED = 12; // digits of the pass's name that a link holds

/**
 * A costly request about one pass, `SGD 0.001@1a2b3c4d5e6f`: another text begins without it. A link without a pass means
 * the pass that it opens.
 */
export function perPass(name: string): { value: string } {
  const held = field(name);
  const ofNow = (): string | undefined => session.pass?.id.slice(0, NAMED);
  $effect(() => {
    if (!session.busy && held.value && !held.value.includes("@") && ofNow()) held.value = `${held.value}@${ofNow()}`;
  });
  return {
    get value() {
      const [value = "", of] = held.value.split("@");
      if (of === undefined) return session.busy ? "" : value; // the pass that is there may be an earlier one
      return of === ofNow() ? value : "";
    },
    set value(given: string) {
      held.value = given && ofNow() ? `${given}@${ofNow()}` : given;
    },
  };
}
