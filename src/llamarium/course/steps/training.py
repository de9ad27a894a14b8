"""The loss, a step of AdamW, and LoRA."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from llamarium.course.step import Arguments, Mistake, Step
from llamarium.course.steps.types import Bools, Floats, Ints, floats


def loss(logits_TV: Floats, ids_T: Ints, is_answer_T: Bools) -> float:
    """Return the mean of -log P(token) over the tokens of the answer.

    P is the softmax of a row of logits: exp(logit), divided by the sum of them; subtract the largest first, as exp
    overflows. The logits at t are of the token at t + 1; so the first token is not predicted, and the last logits are
    not used.

    Args:
        logits_TV: (T, V).
        ids_T: The tokens, (T,).
        is_answer_T: Whether each token belongs to the answer, (T,); the prompt is read, and not learned.

    Returns:
        Nats per token.
    """
    shifted = logits_TV[:-1] - logits_TV[:-1].max(axis=-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    of_tokens = logprobs[np.arange(len(ids_T) - 1), ids_T[1:]]
    return float(-of_tokens[is_answer_T[1:]].mean())


def adamw_step(
    w: Floats,
    gradient: Floats,
    m: Floats,
    v: Floats,
    step: int,
    learning_rate: float,
    beta_1: float,
    beta_2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Floats, Floats, Floats]:
    """Move weights against their gradient (AdamW).

    m and v are running means of the gradient and of its square: m = beta_1 * m + (1 - beta_1) * gradient, and v the
    same with beta_2 and gradient**2. Both begin at 0, so they are corrected before they are used: m is divided by
    1 - beta_1**step, v by 1 - beta_2**step. The weights shrink by learning_rate * weight_decay * w and move by
    -learning_rate * m / (sqrt(v) + eps), with the corrected m and v.

    Args:
        w: Weights.
        gradient: Of the loss, as large as w.
        m: Running mean of the gradient.
        v: Running mean of its square.
        step: 1 for the first step.
        learning_rate: How far to move.
        beta_1: Of m.
        beta_2: Of v.
        eps: A small number, added to the root of v.
        weight_decay: How much the weights shrink.

    Returns:
        The new w, m and v; m and v are not corrected.
    """
    m = np.float32(beta_1) * m + np.float32(1 - beta_1) * gradient
    v = np.float32(beta_2) * v + np.float32(1 - beta_2) * gradient**2
    m_corrected, v_corrected = m / np.float32(1 - beta_1**step), v / np.float32(1 - beta_2**step)
    w = w - np.float32(learning_rate * weight_decay) * w
    return w - np.float32(learning_rate) * m_corrected / (np.sqrt(v_corrected) + np.float32(eps)), m, v


def lora(x_TI: Floats, w_OI: Floats, a_RI: Floats, b_OR: Floats, alpha: float) -> Floats:
    """Multiply by a weight and its low-rank correction: x w.T + alpha / R * (x a.T) b.T.

    Args:
        x_TI: Inputs, (T, I).
        w_OI: The weight of the base, which stays as it is, (O, I).
        a_RI: The correction's first factor, of rank R, (R, I).
        b_OR: Its second factor, (O, R).
        alpha: Its strength; it is divided by the rank.

    Returns:
        (T, O).
    """
    return x_TI @ w_OI.T + np.float32(alpha / len(a_RI)) * ((x_TI @ a_RI.T) @ b_OR.T)


# --- what is often done wrong -----------------------------------------------------------------------------------------


def _loss_so(
    logits: Floats,
    ids: Ints,
    is_answer: Bools,
    *,
    shift: int = 1,
    of: Callable[[Bools], Bools] = lambda is_answer: is_answer[1:],
    joined: Callable[[Floats], Floats] = np.mean,
    surprise: Callable[[Floats], Floats] = lambda logprobs: -logprobs,
) -> float:
    """Compute the loss with one thing changed."""
    logits = logits[: len(logits) - 1] if shift else logits[1:]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    of_tokens = logprobs[np.arange(len(ids) - 1), ids[1:]]
    return float(joined(surprise(of_tokens[of(is_answer)])))


def _loss_of_probabilities(logits: Floats, ids: Ints, is_answer: Bools, *, add: float) -> float:
    powers = np.exp(logits[:-1] - logits[:-1].max(axis=-1, keepdims=True))
    of_tokens = (powers / powers.sum(axis=-1, keepdims=True))[np.arange(len(ids) - 1), ids[1:]]
    return float(-np.log(of_tokens + np.float32(add))[is_answer[1:]].mean())


def _overflowing_loss(logits: Floats, ids: Ints, is_answer: Bools) -> float:
    logprobs = logits[:-1] - np.log(np.exp(logits[:-1]).sum(axis=-1, keepdims=True))
    return float(-logprobs[np.arange(len(ids) - 1), ids[1:]][is_answer[1:]].mean())


def _adamw_so(
    w: Floats, g: Floats, m: Floats, v: Floats, step: int, lr: float, b1: float, b2: float, eps: float, decay: float,
    *, how: str,
) -> tuple[Floats, Floats, Floats]:  # fmt: skip
    """Take a step with one thing changed."""
    if how == "decay in the gradient":
        g, decay = g + np.float32(decay) * w, 0.0
    if how == "betas swapped":
        b1, b2 = b2, b1
    old_m, old_v = m, v
    m = np.float32(b1) * m + np.float32(1 if how in ("no 1 - beta", "no 1 - beta_1") else 1 - b1) * g
    v = np.float32(b2) * v + np.float32(1 if how == "no 1 - beta" else 1 - b2) * (g if how == "no square" else g**2)
    count = {"step from 0": step + 1, "one step behind": max(step - 1, 1)}.get(how, step)
    is_corrected = how != "no correction"
    m_now = m / np.float32(1 - b1**count) if is_corrected else m
    v_now = v / np.float32(1 - b2**count) if is_corrected and how != "m alone" else v
    if how == "beta times step":
        m_now, v_now = m / np.float32(1 - b1 * step), v / np.float32(1 - b2 * step)
    if how == "old means":
        m_now, v_now = old_m / np.float32(1 - b1**step), old_v / np.float32(1 - b2**step)
    root = np.sqrt(v_now + np.float32(eps)) if how == "eps inside" else np.sqrt(v_now) + np.float32(eps)
    root = v_now + np.float32(eps) if how == "no root" else root
    move = np.float32(lr) * (g if how == "gradient" else m_now) / root
    if how == "decay after":
        return (w - move) * np.float32(1 - lr * decay), m, v
    if how == "decay grows":
        return w + np.float32(lr * decay) * w - move, m, v
    shrink = {"decay whole": decay, "no decay": 0.0}.get(how, lr * decay)
    new_w = w - np.float32(shrink) * w + (move if how == "uphill" else -move)
    return (new_w, m_now, v_now) if how == "corrected kept" else (new_w, m, v)


# --- random shapes ----------------------------------------------------------------------------------------------------


def _loss_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    settings = [(8, 11, 3, 1.0, 0), (6, 5, 1, 4.0, 0), (9, 20, 5, 1.0, 0), (5, 7, 1, 300.0, 0)]
    settings += [(4, 6, 1, 1.0, 200), (4, 6, 1, 1.0, 1000)]  # whose exp overflows in float32, and in float64 too
    for tokens, words, prompt, scale, mean in settings:
        is_answer = np.arange(tokens) >= prompt
        is_answer[-1] = tokens % 2 == 0
        yield floats(rng, tokens, words, scale=scale) + np.float32(mean), rng.integers(0, words, tokens), is_answer


def _adamw_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    settings = (1, (4, 3), 1e-8, 0.1), (2, (5,), 1e-3, 0.5), (7, (3, 6), 1e-2, 0.2), (30, (4, 4), 1e-2, 0.3)
    for step, shape, eps, decay in settings:
        moment = min(step - 1, 1)
        m, v = floats(rng, *shape, scale=0.1) * moment, floats(rng, *shape, scale=0.01) ** 2 * moment
        gradient, numbers = floats(rng, *shape, scale=0.1), (step, 0.03, 0.9, 0.95, eps, decay)
        yield floats(rng, *shape), gradient, m.astype(np.float32), v.astype(np.float32), *numbers


def _lora_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    for tokens, inside, out, rank, alpha in ((4, 6, 6, 6, 3.0), (3, 8, 5, 2, 16.0), (5, 4, 9, 3, 1.0)):
        matrices = (floats(rng, *shape) for shape in ((out, inside), (rank, inside), (out, rank)))
        yield floats(rng, tokens, inside), *matrices, alpha


STEPS = (
    Step(
        loss,
        "The loss",
        "A text is its own exercise: at each place the model has given every token a probability, and the next token "
        "is there to see. The loss is the mean surprise at the answer's tokens.",
        "5-how-a-sentence-grows#Learning",
        "learning",
        ("",),
        (
            "logits[:-1] belongs to ids[1:], and so does is_answer[1:].",
            "log softmax: shifted - log(sum(exp(shifted))), with the row's largest logit subtracted first.",
        ),
        _loss_cases,
        (
            Mistake("The loss is on the prompt too; only the answer's tokens count.",
                    partial(_loss_so, of=lambda is_answer: np.ones(len(is_answer) - 1, bool))),
            Mistake("The loss is on the prompt, and not on the answer.",
                    partial(_loss_so, of=lambda is_answer: ~is_answer[1:])),
            Mistake("The mask is not shifted: is_answer[1:] belongs to the tokens that are predicted.",
                    partial(_loss_so, of=lambda is_answer: is_answer[:-1])),
            Mistake("Logits and tokens are not shifted: the logits at t are of the token at t + 1.",
                    partial(_loss_so, shift=0)),
            Mistake("The surprises are summed; their mean is wanted.", partial(_loss_so, joined=np.sum)),
            Mistake("The sum is divided by all tokens; only the answer's are counted.",
                    lambda logits, ids, is_answer:
                        loss(logits, ids, is_answer) * float(is_answer[1:].sum()) / (len(ids) - 1)),
            Mistake("The logarithm is to the base of 2; nats are wanted (np.log).",
                    partial(_loss_so, surprise=lambda logprobs: -logprobs / np.log(2))),
            Mistake("P is rounded to 0 before its logarithm is taken: compute log softmax, logits less the logarithm "
                    "of the sum.", partial(_loss_of_probabilities, add=0.0)),
            Mistake("exp overflows: subtract the largest logit of each row first.", _overflowing_loss),
            Mistake("exp overflows, in float64 too: subtract the largest logit of each row first.",
                    lambda logits, *rest: _overflowing_loss(logits.astype(np.float64), *rest)),
            Mistake("The shift goes the wrong way: the logits at t are of the token at t + 1, not t - 1.",
                    lambda logits, ids, is_answer: loss(np.roll(logits, -2, 0), ids, is_answer)),
            Mistake("exp of the loss is returned (the perplexity); the mean of -log P is wanted.",
                    lambda logits, ids, is_answer: float(np.exp(loss(logits, ids, is_answer)))),
            Mistake("The probability is averaged, without a logarithm.",
                    partial(_loss_so, surprise=lambda logprobs: np.exp(logprobs))),
            Mistake("The missing probability (1 - P) is averaged; the loss is -log P.",
                    partial(_loss_so, surprise=lambda logprobs: 1 - np.exp(logprobs))),
            Mistake("The logarithm of the sum is missing: log softmax subtracts it from the logits.",
                    lambda logits, ids, is_answer: float(-(logits - logits.max(-1, keepdims=True))[
                        np.flatnonzero(is_answer[1:]), ids[1:][is_answer[1:]]].mean())),
            Mistake("The logits are averaged; log softmax makes logarithms of probabilities of them.",
                    lambda logits, ids, is_answer:
                        float(-logits[np.flatnonzero(is_answer[1:]), ids[1:][is_answer[1:]]].mean())),
            Mistake("The sum is divided by all T tokens; only the answer's are counted.",
                    lambda logits, ids, is_answer:
                        loss(logits, ids, is_answer) * float(is_answer[1:].sum()) / len(ids)),
            Mistake("The sign is missing: log P is returned, and a loss is -log P.",
                    partial(_loss_so, surprise=lambda logprobs: logprobs)),
            Mistake("The probabilities are averaged, not their logarithms.",
                    partial(_loss_so, joined=lambda logprobs: -np.log(np.exp(-logprobs).mean()))),
        ),
    ),
    Step(
        adamw_step,
        "A step of AdamW",
        "Each weight keeps a running mean of its gradient and of the gradient's square, and moves by their quotient: "
        "about learning_rate, whatever the gradient's size is.",
        "5-how-a-sentence-grows#Learning",
        "learning",
        ("w *", "m *", "v *"),
        (
            "m and v first, with the new gradient; then their corrections, in other variables.",
            "w - lr * weight_decay * w - lr * m_corrected / (sqrt(v_corrected) + eps).",
        ),
        _adamw_cases,
        (
            Mistake("Weight decay is added to the gradient (Adam with L2); AdamW shrinks the weights themselves.",
                    partial(_adamw_so, how="decay in the gradient")),
            Mistake("m and v are not corrected by 1 - beta**step.", partial(_adamw_so, how="no correction")),
            Mistake("Only m is corrected; v is as well.", partial(_adamw_so, how="m alone")),
            Mistake("eps stands inside the root; it is added to the root.", partial(_adamw_so, how="eps inside")),
            Mistake("step counts from 1 already; step + 1 corrects too little.", partial(_adamw_so, how="step from 0")),
            Mistake("The correction is one step behind.", partial(_adamw_so, how="one step behind")),
            Mistake("Weight decay is not multiplied by the learning rate.", partial(_adamw_so, how="decay whole")),
            Mistake("There is no weight decay.", partial(_adamw_so, how="no decay")),
            Mistake("beta_1 and beta_2 are swapped; beta_1 is m's.", partial(_adamw_so, how="betas swapped")),
            Mistake("v is a mean of the gradient; of its square is meant.", partial(_adamw_so, how="no square")),
            Mistake("The weights move by the gradient; by m is meant.", partial(_adamw_so, how="gradient")),
            Mistake("The weights move uphill; the move is subtracted.", partial(_adamw_so, how="uphill")),
            Mistake("The root is missing: m is divided by v; by the root of v is meant.",
                    partial(_adamw_so, how="no root")),
            Mistake("1 - beta is missing in the running means.", partial(_adamw_so, how="no 1 - beta")),
            Mistake("1 - beta_1 is missing in the running mean m.", partial(_adamw_so, how="no 1 - beta_1")),
            Mistake("beta is multiplied by step in the correction; 1 - beta**step is meant.",
                    partial(_adamw_so, how="beta times step")),
            Mistake("The weights move by m and v from before this step; by the new ones is meant.",
                    partial(_adamw_so, how="old means")),
            Mistake("Weights shrink after the move, and the move with them; the old weights shrink.",
                    partial(_adamw_so, how="decay after")),
            Mistake("Weight decay lets the weights grow; it is subtracted.", partial(_adamw_so, how="decay grows")),
            Mistake("The corrected m and v are kept; they are kept without correction.",
                    partial(_adamw_so, how="corrected kept")),
        ),
    ),
    Step(
        lora,
        "LoRA",
        "Instead of a whole weight, two thin factors are learned beside it: their product has few numbers and moves "
        "the weight's result.",
        "5-how-a-sentence-grows#Learning",
        "learning",
        ("y TO",),
        (
            "Two paths from x: through w, and through a then b. They are added.",
            "The second path is scaled by alpha / R, where R is the number of rows of a.",
        ),
        _lora_cases,
        (
            Mistake("alpha is not divided by the rank.", lambda x, w, a, b, alpha: lora(x, w, a, b, alpha * len(a))),
            Mistake("alpha is divided by the root of the rank (rsLoRA); by the rank is meant.",
                    lambda x, w, a, b, alpha: lora(x, w, a, b, alpha * len(a) ** 0.5)),
            Mistake("alpha is multiplied by the rank; it is divided by it.",
                    lambda x, w, a, b, alpha: lora(x, w, a, b, alpha * len(a) ** 2)),
            Mistake("alpha is divided by the number of outputs; by the rank, the number of rows of a, is meant.",
                    lambda x, w, a, b, alpha: lora(x, w, a, b, alpha * len(a) / len(b))),
            Mistake("alpha is divided by the number of inputs; by the rank, the number of rows of a, is meant.",
                    lambda x, w, a, b, alpha: lora(x, w, a, b, alpha * len(a) / a.shape[1])),
            Mistake("a and b are exchanged, and not transposed: x goes through a.T, then through b.T.",
                    lambda x, w, a, b, alpha: x @ w.T + np.float32(alpha / len(a)) * ((x @ b) @ a)),
            Mistake("The base's weight is transposed: a product is x @ w.T.",
                    lambda x, w, a, b, alpha: x @ w + np.float32(alpha / len(a)) * ((x @ a.T) @ b.T)),
            Mistake("The base's weight and its correction are transposed: a product is x @ (w + ...).T.",
                    lambda x, w, a, b, alpha: x @ w + np.float32(alpha / len(a)) * ((x @ b) @ a)),
            Mistake("There is no correction: a and b are not used.", lambda x, w, a, b, alpha: x @ w.T),
            Mistake("alpha is left out.", lambda x, w, a, b, alpha: lora(x, w, a, b, len(a))),
            Mistake("alpha is left out, and the correction is divided by the rank.",
                    lambda x, w, a, b, alpha: lora(x, w, a, b, 1.0)),
            Mistake("The base's product is left out.",
                    lambda x, w, a, b, alpha: lora(x, np.zeros_like(w), a, b, alpha)),
            Mistake("The correction is subtracted.", lambda x, w, a, b, alpha: lora(x, w, a, b, -alpha)),
            Mistake("The factors are in the wrong order: x goes through a, then through b.",
                    lambda x, w, a, b, alpha: x @ w.T + np.float32(alpha / len(a)) * ((x @ b.T) @ a.T)),
            Mistake("The factors are not transposed: a product is x @ a.T, then @ b.T.",
                    lambda x, w, a, b, alpha: x @ w.T + np.float32(alpha / len(a)) * ((x @ a) @ b)),
            Mistake("The base's product is scaled too.",
                    lambda x, w, a, b, alpha: np.float32(alpha / len(a)) * (x @ w.T + (x @ a.T) @ b.T)),
        ),
    ),
)  # fmt: skip
