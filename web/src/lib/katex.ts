/** What sets formulas, with its letters. */
import katex from "katex";
import "katex/dist/katex.css";

export { katex };
