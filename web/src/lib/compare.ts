/** The requests of the room Compare. */
import type { BitsView, ComparisonView, GroupsView, MomentView, PassView, RunRowsView, RunsView, SidesView } from "../schema";
import { api, bulk, get, ofPass, query } from "./api";
import type { Numbers } from "./numbers";

interface Moment {
  run: string;
  step: number;
  layer: number;
}

export const compareApi = {
  sides: (): Promise<SidesView> => get("/inspect/compare"),
  compare: (pass: PassView, asked: { side: string; against: string; k: number }): Promise<ComparisonView> =>
    api.view<ComparisonView>(pass, "compare", asked),
  bits: (pass: PassView, of: string): Promise<BitsView> => api.view<BitsView>(pass, "bits", { of }),
  runs: (): Promise<RunsView> => get("/inspect/runs"),
  groups: (run: string): Promise<GroupsView> => get(`/inspect/runs/${encodeURIComponent(run)}/groups`),
  rows: (run: string, ids: readonly number[]): Promise<RunRowsView> =>
    get(`/inspect/runs/${encodeURIComponent(run)}/rows${query({ ids: ids.join(",") })}`),
  moment: (pass: PassView, asked: Moment): Promise<MomentView> => api.view<MomentView>(pass, "moment", asked),
  pattern: (pass: PassView, asked: Moment & { head: number }): Promise<Numbers> =>
    ofPass(pass, () => bulk(`/inspect/passes/${pass.id}/moment/pattern${query(asked)}`)),
};
