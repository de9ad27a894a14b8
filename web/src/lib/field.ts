import { session } from "./session.svelte";

/** One input of a view, as its link names it: `const source = field("source")`, then `bind:value={source.value}`. */
export function field(name: string, initial = ""): { value: string } {
  return {
    get value() {
      return session.fields[name] ?? initial;
    },
    set value(given: string) {
      session.fields = { ...session.fields, [name]: given };
    },
  };
}

/** One of a few words; where the link says anything else, the first. */
export function choice<T extends string>(name: string, of: readonly [T, ...T[]]): { value: T } {
  const held = field(name);
  return {
    get value() {
      return of.find((one) => one === held.value) ?? of[0];
    },
    set value(given: T) {
      held.value = given === of[0] ? "" : given;
    },
  };
}

/** Yes or no; a link that does not say is no. */
export function flag(name: string): { value: boolean } {
  const held = field(name);
  return {
    get value() {
      return held.value === "1";
    },
    set value(given: boolean) {
      held.value = given ? "1" : "";
    },
  };
}

/** A whole number from zero on; undefined where the link has none. */
export function whole(name: string): { value: number | undefined } {
  const held = field(name);
  return {
    get value() {
      return /^\d{1,9}$/.test(held.value) ? Number(held.value) : undefined;
    },
    set value(given: number | undefined) {
      held.value = given === undefined ? "" : String(given);
    },
  };
}
