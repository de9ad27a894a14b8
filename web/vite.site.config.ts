/** Builds what a site without a server has besides the page: the script before it, the worker, and the service worker. */
import { defineConfig } from "vite";

export default defineConfig({
  base: "./",
  publicDir: false,
  build: {
    outDir: process.env["LLAMARIUM_SITE_OUT"] ?? "../src/llamarium/page/site/dist",
    emptyOutDir: true,
    target: "es2023",
    modulePreload: { polyfill: false },
    rolldownOptions: {
      input: { start: "src/site/start.ts", worker: "src/site/worker.ts", thread: "src/site/thread.ts", template: "src/site/template.ts", offline: "src/site/offline.ts" },
      output: { entryFileNames: "[name].js", chunkFileNames: "[name].js", assetFileNames: "site.[ext]" },
    },
  },
});
