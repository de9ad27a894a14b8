/** A worker that renders one chat template, and is ended by whoever started it. */
import { written, type Rendering } from "./chat/jinja";

self.addEventListener("message", ({ data }: MessageEvent<Rendering>) => self.postMessage(written(data)), { once: true });
