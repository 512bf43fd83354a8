"""Proposals `q(x' | x)`, one small file per family."""

from .choices import choose as choose
from .choices import chosen as chosen
from .choices import is_finite as is_finite
from .choices import log_probabilities as log_probabilities
from .choices import moved_part as moved_part
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
from .gaussian import checked_scale as checked_scale
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
