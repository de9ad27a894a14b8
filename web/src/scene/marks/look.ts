/** The picture's look: one table of colours, light and dark, and one scale of type and space. */

import type { Ink, Text } from "./marks";

export const INKS: Readonly<Record<"light" | "dark", Readonly<Record<Ink | "paper", string>>>> = {
  light: {
    paper: "#fbfaf7", panel: "#ffffff", ink: "#22211e", soft: "#6e6a61", line: "#e4e0d7",
    says: "#1f5aa6", attention: "#c8701a", mlp: "#27805a", stream: "#8f9aab", chosen: "#1f5aa6",
    key: "#8a5a9e", value: "#b0885c", negative: "#aa1828", positive: "#055096",
  },
  dark: {
    paper: "#131416", panel: "#1d1f22", ink: "#eceae4", soft: "#a19d94", line: "#2e3033",
    says: "#7fb2f5", attention: "#f0a04b", mlp: "#5cc294", stream: "#5f6977", chosen: "#7fb2f5",
    key: "#c39ad6", value: "#d8b48a", negative: "#ffa678", positive: "#82c4fa",
  },
};

/** Four sizes, in CSS pixels. */
export const SIZES: Readonly<Record<Text["size"], number>> = { small: 11, normal: 13, large: 16, title: 21 };

export const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif';
export const MONO = 'ui-monospace, "SF Mono", "Cascadia Mono", Menlo, "DejaVu Sans Mono", "Liberation Mono", monospace';

export const fontOf = ({ size, mono }: Pick<Text, "size" | "mono">): string => `${size === "title" ? "600 " : ""}${SIZES[size]}px ${mono ? MONO : SANS}`;

/** How wide a text is at least, without a canvas: scenes are pure, and leave room by this. */
export const widthOf = (text: string, size: Text["size"], mono = false): number => [...text].length * SIZES[size] * (mono ? 0.602 : 0.56);
