"""Draws `dpo.svg`: the loss of a pair by its margin, and how hard it pulls; `python docs/images/dpo.py` writes it.

Every point is the library's own `dpo_loss`, and the pull its gradient. `tests/unit/test_preference.py` holds the file
to this script.
"""

from pathlib import Path

import torch

from llamarium.train.dpo import dpo_loss

FILE = Path(__file__).with_name("dpo.svg")
WIDE, HIGH, LEFT, TOP = 520, 220, 46, 16
MOST = 6.0  # of a margin and of the loss's axis
X_AXIS = "margin: reward of the chosen less that of the rejected"
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #555 } .axis { stroke: #999 }
  .loss, .pull { fill: none; stroke: #2a6fb8; stroke-width: 2 } .pull { stroke: #b8562a; stroke-dasharray: 6 4 }
  @media (prefers-color-scheme: dark) { text { fill: #bbb } }"""


def curves(num_points: int = 49) -> tuple[list[float], list[float], list[float]]:
    """Return margins, the loss of a pair with that margin, and the share of its gradient: sigmoid(-margin)."""
    margins_P = torch.linspace(-MOST, MOST, num_points, dtype=torch.float64, requires_grad=True)
    policy_E = torch.stack([margins_P, torch.zeros_like(margins_P)], dim=1).flatten()
    loss_P, _ = dpo_loss(policy_E, torch.zeros_like(policy_E), beta=1.0)
    (pull_P,) = torch.autograd.grad(loss_P.sum(), margins_P)
    return margins_P.tolist(), loss_P.tolist(), (-pull_P).tolist()


def path(margins: list[float], values: list[float], most: float) -> str:
    """Return a curve's points."""
    places = (
        f"{LEFT + WIDE * (x + MOST) / (2 * MOST):.1f},{TOP + HIGH * (1 - y / most):.1f}"
        for x, y in zip(margins, values, strict=True)
    )
    return "M" + " L".join(places)


def picture() -> str:
    """Return the SVG."""
    margins, losses, pulls = curves()
    ticks = "".join(
        f'<text x="{LEFT + WIDE * (x + MOST) / (2 * MOST):.0f}" y="{TOP + HIGH + 18}" text-anchor="middle">{x:g}</text>'
        for x in (-6, -4, -2, 0, 2, 4, 6)
    ) + "".join(
        f'<text x="{LEFT - 8}" y="{TOP + HIGH * (1 - y / MOST) + 4:.0f}" text-anchor="end">{y}</text>'
        for y in (0, 2, 4, 6)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE + LEFT + 20} {HIGH + TOP + 46}">
<style>{STYLE}
</style>
<path class="axis" d="M{LEFT} {TOP} V{TOP + HIGH} H{LEFT + WIDE} M{LEFT + WIDE / 2} {TOP} V{TOP + HIGH}" fill="none"/>
<path class="loss" d="{path(margins, losses, MOST)}"/>
<path class="pull" d="{path(margins, pulls, 1.0)}"/>
{ticks}
<text x="{LEFT + WIDE / 2}" y="{TOP + HIGH + 38}" text-anchor="middle">{X_AXIS}</text>
<text x="{LEFT + 40}" y="{TOP + 110}">loss, nats</text><text x="{LEFT + 310}" y="{TOP + 90}">pull, 1 at the top</text>
</svg>
"""


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
