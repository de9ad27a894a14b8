import { readFileSync } from "node:fs";
import katex from "katex";
import { expect, it } from "vitest";
import { lighter } from "../plugins/katex";

const FORMULAS = [
  String.raw`\mathrm{RMSNorm}(x)_i = \frac{x_i}{\sqrt{\tfrac{1}{D}\sum_j x_j^2 + \varepsilon}} \cdot \gamma_i \qquad \text{here}\ 0.5`,
  String.raw`\left( \frac{e^{z_i / \tau}}{\sum_{j\;\mathrm{left}} e^{z_j / \tau}} \right) \odot \big(u\big) - \ln(-\ln u_i), \quad \arg\max_i`,
  String.raw`e_l = \frac{\lVert x_l - y_l \rVert}{\lVert y_l \rVert} \leftarrow \Theta + \Delta \eta \frac{\partial L}{\partial W} \to \infty \mid \top \ldots \cos\theta \Big|`,
];

it("sets every formula as the whole of KaTeX does", async () => {
  const code = readFileSync("node_modules/katex/dist/katex.mjs", "utf8");
  const light = lighter(code);
  expect(code.length - light.length).toBeGreaterThan(60_000);
  const made = (await import(`data:text/javascript;base64,${Buffer.from(light).toString("base64")}`)) as { default: typeof katex };
  for (const formula of FORMULAS) expect(made.default.renderToString(formula, { throwOnError: true }), formula).toBe(katex.renderToString(formula, { throwOnError: true }));
});
