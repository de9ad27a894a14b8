/** The picture's look: one table of colours, light and dark, and one scale of type and space. */

import type { Ink, Text } from "./marks";

export const INKS: Readonly<Record<"light" | "dark", Readonly<Record<Ink | "paper", string>>>> = {
  light: {
    paper: "#fbfaf7", panel: "#ffffff", ink: "#22211e", soft: "#6e6a61", line: "#e4e0d7",
    says: "#2160b0", attention: "#cf7a1c", mlp: "#0b4f33", stream: "#8f9aab", chosen: "#0b2a56",
    key: "#4a3f35", value: "#b9ac97", negative: "#aa1828", positive: "#055096",
  },
  dark: {
    paper: "#131416", panel: "#1d1f22", ink: "#eceae4", soft: "#a19d94", line: "#2e3033",
    says: "#7fb2f5", attention: "#f5a94f", mlp: "#2f9a8c", stream: "#5f6977", chosen: "#dceaff",
    key: "#ead9c2", value: "#93836c", negative: "#ffa678", positive: "#82c4fa",
  },
};

/** The colours as variables of a style, for what is drawn beside the picture. */
export const inkStyle = (dark: boolean): string =>
  Object.entries(INKS[dark ? "dark" : "light"]).filter(([ink]) => ["stream", "says", "attention", "mlp", "key", "value"].includes(ink)).map(([ink, color]) => `--${ink}:${color}`).join(";");

/** Colours of the groups of heads, in their order, then from the first again. None is the MLP's; neighbours are told apart by every eye (`tests/colors.test.ts`). */
export const HEADS: Readonly<Record<"light" | "dark", readonly string[]>> = {
  light: ["#cf7a1c", "#17115f", "#638ee3", "#7a21ba", "#3d7a8f", "#581579", "#9c56e1", "#25a9d4"],
  dark: ["#f5a94f", "#6b45de", "#86c0ea", "#b23434", "#f3f3ba", "#a86ce5", "#b4d7e9", "#da562b"],
};

export const headColor = (group: number, dark: boolean): string => {
  const all = HEADS[dark ? "dark" : "light"];
  return all[group % all.length] as string;
};

/** The colour of a mark. */
export const inkColor = ({ ink, hue }: { ink: Ink; hue?: number | undefined }, dark: boolean): string => (hue === undefined ? INKS[dark ? "dark" : "light"][ink] : headColor(hue, dark));

/** Four sizes, in CSS pixels. */
export const SIZES: Readonly<Record<Text["size"], number>> = { small: 11, normal: 13, large: 16, title: 21 };

export const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif';
export const MONO = 'ui-monospace, "SF Mono", "Cascadia Mono", Menlo, "DejaVu Sans Mono", "Liberation Mono", monospace';

export const fontOf = ({ size, mono }: Pick<Text, "size" | "mono">): string => `${size === "title" ? "600 " : ""}${SIZES[size]}px ${mono ? MONO : SANS}`;

/** How wide a text is at least, without a canvas: scenes are pure, and leave room by this. */
export const widthOf = (text: string, size: Text["size"], mono = false): number => [...text].length * SIZES[size] * (mono ? 0.602 : 0.56);
