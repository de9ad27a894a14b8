/** What a picture is of. The page's own is its session; a figure in a text has one of its own. */

import type { ModelView, PassView } from "../../schema";
import type { Place } from "../places/place";

type Chosen = Pick<Place, "pos" | "layer" | "head">;

export interface Subject {
  readonly pass: PassView | undefined;
  readonly model: ModelView | undefined;
  /** What the pass was asked for by; by its ids where there are any. */
  readonly text: string;
  readonly bos: boolean;
  readonly ids: readonly number[] | undefined;
  readonly going: Chosen;
  go(to: Partial<Chosen>): void;
}

/** A picture that stands in a text: it has a place of its own. */
export interface Figure extends Subject {
  readonly place: Place;
  /** A place was entered in it. */
  open(place: Place): void;
}
