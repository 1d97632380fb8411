"""What happened in a step, in sentences."""

from __future__ import annotations

from tercel.decode.trace import Choice
from tercel.decode.verify import Trial
from tercel.explain.pieces import shown
from tercel.explain.steps import Explanation, Step

LEGEND = (
    "q: the draft's probability of a token behind the one before it; p: the target's, with everything that the request "
    "asks for. ✓: drafted and accepted. In brackets or a round box: the target's own token."
)


def headline(step: Step) -> str:
    """In one line."""
    if not step.number:
        return "The prompt: the target chooses the first token"
    drafted, accepted = len(step.trace.nodes) - 1, len(step.trace.path)
    if not drafted:
        return f"Step {step.number}: nothing drafted, 1 token from one forward pass"
    return (
        f"Step {step.number}: {accepted} of {drafted} drafted {_tokens(drafted)} accepted, "
        f"{accepted + 1} {_tokens(accepted + 1)} from one forward pass"
    )


def standing(step: Step) -> str:
    """How far the answer is with it."""
    if not step.number:
        return "It comes without drafts and counts in no acceptance length."
    ended = len([piece for piece in step.pieces if piece.token is not None])
    cut = "" if ended == len(step.trace.choices) else f"The answer ends after {ended} of them. "
    return f"{cut}So far: {step.tokens} {_tokens(step.tokens)}, acceptance length τ {step.tau:.2f}."


def total(explanation: Explanation) -> str:
    """The whole answer in one line."""
    result, last = explanation.result, explanation.steps[-1]
    return (
        f"{len(result.tokens)} {_tokens(len(result.tokens))} in {result.steps} steps, τ {result.tau:.2f}; "
        f"{last.accepted} of {last.drafted} drafted {_tokens(last.drafted)} accepted"
    )


def told(step: Step, place: int) -> str:
    """What the target chose behind a node of the accepted path, and how."""
    choice, taken = step.trace.choices[place], shown(step.taken[place])
    behind = shown(step.names[choice.node])
    below = [shown(step.names[child]) for child in step.children(choice.node)]
    if place < len(step.trace.path):
        came = f"which was drafted: accepted ({len(below)} drafted there)" if len(below) > 1 else "as drafted: accepted"
    elif below:
        came = f"instead of the drafted {_listed(below)}"
    else:
        came = "where nothing was drafted"
    likely = "" if choice.probability is None else f" (p {choice.probability:.3f})"
    sentences = [f"Behind {behind} the target took {taken}{likely}, {came}."]
    sentences += [_trial(step, trial, again=place > 0) for place, trial in enumerate(choice.trials)]
    if choice.lossy:
        sentences.append("The target would have drawn another: the method's own rule, which is lossy, let it pass.")
    if choice.uniform is not None:
        sentences.append(_drawn(choice, taken))
    return " ".join(sentences)


def _trial(step: Step, trial: Trial, again: bool) -> str:
    p = "what the rejections left of p" if again else "p"
    chance = min(1.0, trial.target / trial.draft)
    how = "below it: accepted" if trial.accepted else "not below it: rejected"
    return (
        f"{shown(step.names[trial.child])} was drawn by the draft with q {trial.draft:.3f}, and {p} is "
        f"{trial.target:.3f}: accepted with a chance of {chance:.3f}; its number {trial.uniform:.4f} is {how}."
    )


def _drawn(choice: Choice, taken: str) -> str:
    assert choice.span is not None
    low, high = choice.span
    left = "what the rejections left of p" if choice.trials else "the target's distribution"
    return (
        f"It was drawn: this position's number {choice.uniform:.4f} lies between {low:.4f} and {high:.4f}, which is "
        f"where {taken} lies in {left} ({high - low:.3f} of it)."
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _tokens(count: int) -> str:
    return "token" if count == 1 else "tokens"
