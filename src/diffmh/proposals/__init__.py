"""Proposals `q(x' | x)`, one small file per family."""

from .finite import FiniteProposal as FiniteProposal
from .finite import OtherState as OtherState
from .finite import TransitionMatrix as TransitionMatrix
from .finite import check_label_dtype as check_label_dtype
from .finite import refuse_labels as refuse_labels
from .forgetting import Forgotten as Forgotten
from .forgetting import forget as forget
from .gaussian import CrankNicolson as CrankNicolson
from .gaussian import GaussianProposal as GaussianProposal
from .gaussian import GaussianWalk as GaussianWalk
from .gaussian import check_floats as check_floats
from .gaussian import scale_array as scale_array
from .gaussian import scale_by_leaf as scale_by_leaf
from .gaussian import scale_conditions as scale_conditions
from .independence import Independence as Independence
from .on import On as On
from .one_label import OneLabel as OneLabel
from .proposal import Coupling as Coupling
from .proposal import NoiseProposal as NoiseProposal
from .proposal import Proposal as Proposal
from .proposal import draw_one as draw_one
from .proposal import move as move
from .proposal import proposal_noise as proposal_noise
from .spin_flip import SpinFlip as SpinFlip
