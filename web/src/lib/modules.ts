/** The model's tree of modules. */
import type { ModuleNode } from "../schema";

/** The module of a path below a node, or the node itself; undefined where there is none. */
export function find(node: ModuleNode | undefined, path: string): ModuleNode | undefined {
  if (!node || node.path === path) return node;
  return find(node.children.find((child) => path === child.path || path.startsWith(`${child.path}.`)), path);
}
