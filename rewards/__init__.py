"""Rewards: callables that score generated samples. `rewards.contract` says what one looks like.

This package imports nothing of `genrl`, and no torch until a reward is loaded.
"""

from rewards.contract import Needs as Needs
from rewards.contract import Reward as Reward
from rewards.contract import Scores as Scores
from rewards.contract import check_columns as check_columns
from rewards.contract import check_row as check_row
from rewards.contract import close as close
from rewards.contract import is_trainable as is_trainable
from rewards.contract import move as move
from rewards.contract import name_of as name_of
from rewards.contract import needs as needs
from rewards.contract import score as score
from rewards.contract import score_with_gradients as score_with_gradients
from rewards.declared import Declared as Declared
from rewards.declared import lower_end as lower_end
from rewards.failures import Failure as Failure
from rewards.failures import RewardFailed as RewardFailed
from rewards.failures import check_failures as check_failures
from rewards.failures import first_failure as first_failure
from rewards.loading import Listed as Listed
from rewards.loading import Origin as Origin
from rewards.loading import declaration as declaration
from rewards.loading import listing as listing
from rewards.loading import load as load
from rewards.loading import resolve as resolve
from rewards.pictures import open_picture as open_picture
from rewards.pictures import to_pil as to_pil
from rewards.pictures import to_uint8 as to_uint8
