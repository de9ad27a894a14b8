/** What the views of the room Ask ask of the server, besides what `api` has. */

import type { EditedRequest, EditedView, HeadKinds, Lens, PassView, PatchBeginView, PatchCellsView, PatchRequest } from "../schema";
import { get, ofPass, post, query } from "./api";
import { follow } from "./events";

export type PatchEvent = PatchBeginView | PatchCellsView;

export const ask = {
  headKinds: (pass: PassView): Promise<HeadKinds> => ofPass(pass, () => get(`/inspect/passes/${pass.id}/head_kinds`)),
  lensGrid: (
    pass: PassView, asked: { after: "attention" | "mlp"; token_id?: number | undefined; start: number; stop: number; stride?: number },
  ): Promise<Lens> => ofPass(pass, () => get(`/inspect/passes/${pass.id}/lens/grid${query(asked)}`)),
  edited: (pass: PassView, body: EditedRequest): Promise<EditedView> =>
    ofPass(pass, () => post(`/inspect/passes/${pass.id}/edited`, body)),
  patches: (pass: PassView, body: PatchRequest, take: (event: PatchEvent) => void, signal: AbortSignal): Promise<void> =>
    ofPass(pass, () => follow(`/inspect/passes/${pass.id}/patches`, body, take, signal)),
};
