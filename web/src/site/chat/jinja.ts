/** Renders a chat template from a file: in a worker of its own, which is ended where it does not end by itself. */
import { Template } from "@huggingface/jinja";

export interface Rendering {
  readonly template: string;
  /** The template is rendered for each of them. */
  readonly variables: readonly Readonly<Record<string, unknown>>[];
}

export type Written = { readonly text: string } | { readonly error: string };

/** What the template writes for each of the variables, or why it writes nothing. */
export function written({ template, variables }: Rendering): Written[] {
  let compiled: Template;
  try {
    compiled = new Template(template);
  } catch (error) {
    return variables.map(() => ({ error: messageOf(error) }));
  }
  return variables.map((one) => {
    try {
      return { text: compiled.render({ ...one }) };
    } catch (error) {
      return { error: messageOf(error) };
    }
  });
}

const messageOf = (error: unknown): string => (error instanceof Error ? error.message : String(error)).slice(0, 1000);
