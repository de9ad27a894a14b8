/** Arrow keys among the links and buttons of a strip, of which only the chosen one is a tab stop. */

export function walk(event: KeyboardEvent & { currentTarget: HTMLElement }): void {
  const to = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!to || event.shiftKey || event.ctrlKey || event.altKey || event.metaKey) return;
  const links = [...event.currentTarget.querySelectorAll<HTMLElement>("a, button")];
  links[links.indexOf(document.activeElement as HTMLElement) + to]?.focus();
  event.preventDefault();
}
