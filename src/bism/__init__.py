"""Learn energy-based models with latent variables, p(v, h) ∝ exp(−E(v, h)), from data v alone."""

from .ais import ais as ais, reverse_ais as reverse_ais
from .baselines import (
    NCE as NCE,
    VNCE as VNCE,
    ContrastiveDivergence as ContrastiveDivergence,
    MaximumLikelihood as MaximumLikelihood,
    ScoreMatching as ScoreMatching,
)
from .bilevel import BiSM as BiSM
from .divergence import KL as KL, Divergence as Divergence, Fisher as Fisher
from .energy import EBLVM as EBLVM, EBM as EBM, fisher as fisher, score as score, surrogate_score as surrogate_score
from .likelihood import Grid as Grid, log_likelihood as log_likelihood, log_partition as log_partition
from .method import Method as Method, State as State
from .models import GaussianRBM as GaussianRBM, MLPEnergy as MLPEnergy, MLPFreeEnergy as MLPFreeEnergy
from .objective import DSM as DSM, MDSM as MDSM, SM as SM, SSM as SSM, Objective as Objective
from .optimizer import adam as adam
from .posterior import (
    BernoulliPosterior as BernoulliPosterior,
    Distribution as Distribution,
    GaussianPosterior as GaussianPosterior,
    Posterior as Posterior,
)
from .response import (
    ConjugateGradient as ConjugateGradient,
    FirstOrder as FirstOrder,
    NaturalGradient as NaturalGradient,
    Neumann as Neumann,
    Response as Response,
    Unroll as Unroll,
)
from .sampling import (
    AnnealedLangevin as AnnealedLangevin,
    Gibbs as Gibbs,
    JointLadder as JointLadder,
    Kernel as Kernel,
    Ladder as Ladder,
    Langevin as Langevin,
    Sweep as Sweep,
    chain as chain,
    denoise as denoise,
    ladder_levels as ladder_levels,
    sample as sample,
    trajectory as trajectory,
)
from .training import Diverged as Diverged, Run as Run, fit as fit, load as load
from .version import __version__ as __version__
