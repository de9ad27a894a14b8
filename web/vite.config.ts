import { svelte } from "@sveltejs/vite-plugin-svelte";
import { type Plugin } from "vite";
import { defineConfig } from "vitest/config";
import { course } from "./plugins/course.ts";

/** Of KaTeX's fonts only woff2 is shipped, and of its families those that the formulas use. */
const families = /KaTeX_(Main-Regular|Math-Italic|Size[1-3]-Regular)\.woff2/;

function fewerFonts(): Plugin {
  return {
    name: "fewer-fonts",
    enforce: "pre",
    transform(code, id) {
      if (!id.includes("katex") || !id.split("?")[0]?.endsWith(".css")) return null;
      const kept = code
        .replace(/@font-face\s*\{[^}]*\}/g, (face) => (families.test(face) ? face : ""))
        .replace(/,\s*url\([^)]*\.(woff|ttf)\)\s*format\(["'][a-z0-9]+["']\)/g, "");
      return { code: kept, map: null };
    },
  };
}

export default defineConfig({
  base: "./", // the page is served under any path
  plugins: [fewerFonts(), course(), svelte()],
  build: {
    outDir: process.env["LLAMARIUM_PAGE_OUT"] ?? "../src/llamarium/page/dist",
    emptyOutDir: true,
    assetsInlineLimit: 0, // a data: address would be foreign to the page's content security policy
    modulePreload: { polyfill: false },
    target: "es2022",
    rolldownOptions: {
      output: {
        // The views of these rooms come together: packed as one, they are smaller than apart.
        codeSplitting: {
          includeDependenciesRecursively: false,
          groups: ["ask", "compare", "chat", "stages"].map((room) => ({ name: room, test: new RegExp(`/web/src/${room}/(?!index)`) })),
        },
      },
    },
  },
  test: { include: ["tests/**/*.test.ts"], environment: "node", testTimeout: 20_000, isolate: false },
});
