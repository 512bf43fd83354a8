"""What kernels refuse."""

from refusals import KEY, NORMAL, WALK, cases, expect, log_normal, refused

import diffmh


@cases(
    number=(lambda: expect(2.38), TypeError, "`kernel` must be … Kernel`, got 2.38"),
    function=(
        lambda: expect(log_normal),
        TypeError,
        "`kernel` must be … Kernel`, got … log_normal",
    ),
    proposal=(lambda: expect(WALK), TypeError, "`kernel` must be … Kernel`, got GaussianWalk"),
    traced=(
        lambda: diffmh.trace(WALK, 0.5, KEY, init=0.0, num_steps=5),
        TypeError,
        "`kernel` must be … got GaussianWalk",
    ),
    checked=(
        lambda: diffmh.check(WALK, 0.5, KEY, init=0.0),
        TypeError,
        "`kernel` must be … got GaussianWalk",
    ),
    empty_cycle=(
        lambda: diffmh.Cycle(),
        ValueError,
        "`Cycle(...)` needs at least one kernel, got none",
    ),
    cycle=(
        lambda: diffmh.Cycle(NORMAL, WALK),
        TypeError,
        "Cycle … `kernel` must be … got GaussianWalk",
    ),
    repeat=(
        lambda: diffmh.Repeat(WALK, 2),
        TypeError,
        "Repeat … `kernel` must be … got GaussianWalk",
    ),
    coupling=(
        lambda: diffmh.MetropolisHastings(log_normal, WALK, "maximal"),
        TypeError,
        "`coupling` must be … 'maximal'",
    ),
    coupling_class=(
        lambda: diffmh.MetropolisHastings(log_normal, WALK, diffmh.Maximal),
        TypeError,
        "`coupling` must … a class",
    ),
)
def test_kernels(call, error, words):
    refused(call, error, words)
