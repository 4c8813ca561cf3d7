"""Rewards: callables that score generated samples. `genrl_rewards.contract` says what one looks like.

This package imports nothing of `genrl`, and no torch until a reward is loaded.
"""

from genrl_rewards.contract import Needs as Needs
from genrl_rewards.contract import Reward as Reward
from genrl_rewards.contract import Scores as Scores
from genrl_rewards.contract import check_columns as check_columns
from genrl_rewards.contract import check_row as check_row
from genrl_rewards.contract import close as close
from genrl_rewards.contract import is_trainable as is_trainable
from genrl_rewards.contract import move as move
from genrl_rewards.contract import name_of as name_of
from genrl_rewards.contract import needs as needs
from genrl_rewards.contract import score as score
from genrl_rewards.contract import score_with_gradients as score_with_gradients
from genrl_rewards.declared import Declared as Declared
from genrl_rewards.declared import lower_end as lower_end
from genrl_rewards.declared import misfit as misfit
from genrl_rewards.failures import Failure as Failure
from genrl_rewards.failures import RewardFailed as RewardFailed
from genrl_rewards.failures import check_failures as check_failures
from genrl_rewards.failures import first_failure as first_failure
from genrl_rewards.loading import Listed as Listed
from genrl_rewards.loading import Origin as Origin
from genrl_rewards.loading import declaration as declaration
from genrl_rewards.loading import listing as listing
from genrl_rewards.loading import load as load
from genrl_rewards.loading import resolve as resolve
from genrl_rewards.pictures import open_picture as open_picture
from genrl_rewards.pictures import to_pil as to_pil
from genrl_rewards.pictures import to_uint8 as to_uint8
