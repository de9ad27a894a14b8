/** Of KaTeX only what the page's formulas use: fewer fonts, and no tables of those that are left out. */

import type { Plugin } from "vite";

/** Only woff2 is shipped, and of these families alone. */
const shipped = /KaTeX_(Main-Regular|Math-Italic|Size[1-3]-Regular)\.woff2/;
/** A family's table of widths and heights. Size4 has no font here, and KaTeX itself reads its table. */
const METRICS = /^  "(?!Main-Regular|Math-Italic|Size\d-Regular)([A-Za-z]+-[A-Za-z]+)": \{\n(?:    .*\n)*?  \}/gm;
/** Signs of a font that is not shipped. */
const AMS_SYMBOL = /^defineSymbol\((?:math|text), ams, .*\);\n/gm;

/** KaTeX's module without them. */
export const lighter = (code: string): string => code.replace(METRICS, '  "$1": {}').replace(AMS_SYMBOL, "");

const fewerFaces = (code: string): string =>
  code
    .replace(/@font-face\s*\{[^}]*\}/g, (face) => (shipped.test(face) ? face : ""))
    .replace(/,\s*url\([^)]*\.(woff|ttf)\)\s*format\(["'][a-z0-9]+["']\)/g, "");

export function lightKatex(): Plugin {
  return {
    name: "light-katex",
    enforce: "pre",
    transform(code, id) {
      const file = id.split("?")[0] ?? "";
      if (!file.includes("katex")) return null;
      if (file.endsWith(".css")) return { code: fewerFaces(code), map: null };
      return file.endsWith("katex.mjs") ? { code: lighter(code), map: null } : null;
    },
  };
}
