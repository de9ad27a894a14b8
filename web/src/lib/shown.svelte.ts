/** What the open view shows as numbers, for a file; the view says so while it is there. */
class Shown {
  numbers = $state.raw<(() => unknown) | undefined>();
}

export const shown = new Shown();

/** Say what a view's numbers are, while the component that calls this is there. */
export function shows(numbers: () => (() => unknown) | undefined): void {
  $effect(() => {
    const mine = numbers();
    shown.numbers = mine;
    return () => {
      if (shown.numbers === mine) shown.numbers = undefined;
    };
  });
}
