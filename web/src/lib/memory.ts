/** What the browser keeps from visit to visit. It may be full, or switched off: then nothing is kept, and all else works. */

export function recall(name: string, storage = (): Storage => localStorage): string | null {
  try {
    return storage().getItem(name);
  } catch {
    return null;
  }
}

/** Keep a text, or none; tell whether it is kept. */
export function remember(name: string, text: string | undefined, storage = (): Storage => localStorage): boolean {
  try {
    if (text === undefined) storage().removeItem(name);
    else storage().setItem(name, text);
    return true;
  } catch {
    return false;
  }
}
