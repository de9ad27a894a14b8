/** Why nothing can be shown, if nothing can. */
export type Trouble =
  | { kind: "loading"; progress: number }
  | { kind: "tabs" }
  | { kind: "key"; isWrong: boolean }
  | { kind: "gone"; message: string }
  | { kind: "refused"; message: string; retry: boolean };
