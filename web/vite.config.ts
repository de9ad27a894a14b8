import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vitest/config";
import { course } from "./plugins/course.ts";
import { lightKatex } from "./plugins/katex.ts";

export default defineConfig({
  base: "./", // the page is served under any path
  plugins: [lightKatex(), course(), svelte()],
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
          groups: ["ask", "compare", "chat", "stages"].map((room) => ({ name: room, test: new RegExp(`/web/src/${room}/(?!index)`) })).concat({
            name: "parts", // of the views, not of the first screen
            test: /\/web\/src\/parts\/(?!Header|View|Status|Trouble|Waiting|Export)/,
          }),
        },
      },
    },
  },
  test: { include: ["tests/**/*.test.ts"], environment: "node", testTimeout: 60_000, isolate: false },
});
