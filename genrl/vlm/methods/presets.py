"""Every published method as settings: `PRESETS["vppo"]`, and `NOT_PRESETS`, what cannot be one and why.

A preset holds the loss. Data, rewards and prompts of a system are named in its `notes`; "inferred" there marks a
constant that its source does not give and that is ours. `recipe.changed(preset)` prints one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from genrl.vlm.methods.recipe import (
    BatchNormalise,
    Cispo,
    Classification,
    Clip,
    ConsistencyBonus,
    CriticAdvantage,
    DistributionMatching,
    Divergence,
    DynamicClip,
    ElasticClip,
    EngineMismatch,
    EntropyBand,
    EntropyBonus,
    EntropyPenalty,
    GroupAdvantage,
    Hierarchical,
    Kl,
    KlInReward,
    LeaveOneOut,
    LinearBound,
    LogClamp,
    NormaliseThenSum,
    OffPolicyMask,
    Perception,
    Preference,
    Preset,
    RankQuantiles,
    Regression,
    Reinforce,
    Sapo,
    SequenceClip,
    SequenceTokenClip,
    SigmaFilter,
    SmoothedAdvantage,
    StepMeans,
    TopDependency,
    TopEntropy,
    TrajectoryDependency,
    Uncertainty,
    ValueLoss,
    Vespo,
    VirtualReward,
    WhitenedReturns,
)

_Z = GroupAdvantage()  # TRL and the trainers made from R1-V: std + 1e-4
_Z_VERL = GroupAdvantage(eps=1e-6)  # verl and EasyR1
_DAPO_CLIP = Clip(low=0.2, high=0.28)

# --- methods of language models that carry over to pictures unchanged

GRPO = Preset(_Z, Clip(), "seq_mean", regularisers=(Kl(0.04),), source="arXiv 2402.03300")
DR_GRPO = Preset(
    GroupAdvantage("none"),
    Clip(),
    "const",
    source="arXiv 2503.20783",
    notes="length is to be set to the longest completion allowed",
)
DAPO = Preset(
    _Z,
    _DAPO_CLIP,
    "token_mean_global",
    source="arXiv 2503.14476",
    notes="groups without spread are dropped and drawn again; overlong rows are masked or get OverlongPenalty",
)
BNPO = Preset(_Z, Clip(), "token_mean", source="TRL loss_type bnpo")
GSPO = Preset(_Z, SequenceClip(), "seq_mean", source="arXiv 2507.18071", notes="4 updates per rollout")
GSPO_TOKEN = Preset(_Z, SequenceTokenClip(), "seq_mean", source="arXiv 2507.18071")
LUSPO = Preset(_Z, SequenceClip(), "seq_sum", source="TRL loss_type luspo")
CISPO = Preset(_Z, Cispo(), "token_mean_global", source="arXiv 2506.13585")
SAPO = Preset(_Z, Sapo(), "seq_mean", source="arXiv 2511.20347")
VESPO = Preset(_Z, Vespo(), "token_mean_global", source="TRL loss_type vespo")
RLOO = Preset(
    LeaveOneOut(),
    Reinforce(),
    "seq_mean",
    reward_terms=(KlInReward(0.05),),
    source="arXiv 2402.14740",
    notes="beta is TRL's default",
)
REINFORCE_PP = Preset(
    WhitenedReturns(),
    Clip(),
    "seq_mean",
    reward_terms=(KlInReward(0.01),),
    source="arXiv 2501.03262",
    notes="beta is OpenRLHF's default; no groups are needed",
)
REINFORCE_PP_BASELINE = replace(REINFORCE_PP, advantage=WhitenedReturns(baseline=True))
GDPO = Preset(
    NormaliseThenSum(weights=(1.0, 1.0)),
    Clip(),
    "seq_mean",
    source="arXiv 2601.05242; TRL normalize_then_sum",
    notes="weights are to be set to one number per reward",
)
NGRPO = Preset(
    VirtualReward(),
    Clip(low=0.16, high=0.24),
    "token_mean",
    source="arXiv 2509.18851 and code",
    notes="groups that are all correct are dropped; rewards are at most `best`",
)
DCPO = Preset(
    SmoothedAdvantage(),
    DynamicClip(),
    "otm",
    source="arXiv 2509.02333 and code",
    notes="statistics by prompt are part of a checkpoint; the scripts have widths .2 and .28",
)
ETR = Preset(_Z, ElasticClip(), "seq_mean", source="abstract", notes="experimental: form and constants inferred")
BALANCED = Preset(_Z, Clip(), "balanced", source="abstract", notes="signs pooled over a micro-batch: inferred")
FORKING_TOKENS = Preset(_Z, _DAPO_CLIP, "token_mean_global", weights=(TopEntropy(0.2),), source="arXiv 2506.01939")
OFF_POLICY_MASK = Preset(
    _Z,
    Clip(),
    "seq_mean",
    weights=(OffPolicyMask(0.5),),
    source="DeepSeek-V3.2; TRL",
    notes="threshold inferred",
)

# --- vision-language systems whose loss is their own

VPPO = Preset(
    _Z_VERL,
    Clip(low=0.2, high=0.28, dual=3.0),
    "token_mean",
    transforms=(TrajectoryDependency(0.9),),
    weights=(TopDependency(0.4),),
    regularisers=(EntropyPenalty(0.06),),
    source="VPPO, paper and code",
    notes="masked picture: patches of 14 pixels black with probability .5; groups filtered; aggregation as coded, the "
    "paper has seq_mean; penalty .12 for 8B",
)
TW_GRPO = Preset(
    _Z,
    Clip(),
    "token_mean",
    weights=(Divergence(1.7),),
    source="TW-GRPO, paper and code",
    notes="with a KL: Kl(weighted=True); multi-choice soft accuracy as reward, questions inverted to multi-choice",
)
Q_HAWKEYE = Preset(
    _Z,
    Clip(),
    "seq_mean",
    transforms=(Uncertainty(0.2),),
    regularisers=(Kl(0.04), Perception()),
    source="Q-Hawkeye, paper and code",
    notes="gamma falls to 0 over 5 epochs (objectives.decay.cosine); G = 4; the reward `rating` + .8 format",
)
G2RPO = Preset(
    RankQuantiles(),
    Clip(),
    "seq_mean",
    regularisers=(EntropyBand(0.01, 0.2, 0.9),),
    source="OpenVLThinkerV2",
    notes="band and its coefficient inferred (they are per task); a LengthReward per task; ranks within the group",
)
GRPO_CARE = Preset(
    _Z,
    Clip(),
    "seq_mean",
    reward_terms=(ConsistencyBonus(),),
    source="arXiv 2506.16141",
    notes="on policy, one update per rollout; reference is the policy's moving average, decay .995, every 10 steps; "
    "margin .01 for general video",
)
STABLE_REINFORCE = Preset(
    WhitenedReturns(eps=0.0),
    LogClamp(),
    "seq_mean",
    reward_terms=(KlInReward(1e-3),),
    transforms=(SigmaFilter(3.0),),
    source="arXiv 2505.02835",
    notes="R1-Reward; reward accuracy (1 + .5 consistency) + .5 format, consistency from a judge; G = 1",
)
SPINE = Preset(
    _Z,
    Clip(),
    "seq_mean",
    weights=(TopEntropy(0.2, scope="row"),),
    regularisers=(EntropyBand(0.01, 0.25, 0.75, bounds="quantile", tokens="weighted"),),
    source="abstract",
    notes="reward: majority vote of the group, no labels; share, quantiles and coefficient inferred",
)
PARA_GRPO = Preset(
    _Z,
    Clip(),
    "token_mean",
    transforms=(BatchNormalise(),),
    weights=(EngineMismatch("token", "mask", high=5.0),),
    regularisers=(Kl(0.01),),
    source="ParaVT",
    notes="forced prefix `<think>` with mask 0; a random frame budget per prompt; rewards accuracy + format + tool",
)
REG_GRPO = Preset(
    _Z,
    None,
    "seq_mean",
    regularisers=(Kl(0.04),),
    group_loss=Regression(),
    source="arXiv 2506.07464",
    notes="DeepVideo-R1; two updates per rollout or more, with gradient clipping; augmentation by difficulty; eps and "
    "beta inferred",
)
REAL = Preset(_Z, None, "seq_mean", group_loss=Classification(), source="REAL; group rule of ms-swift")
DMPO = Preset(
    _Z, None, "seq_mean", group_loss=DistributionMatching(), source="abstract", notes="experimental: inferred"
)
DPO = Preset(
    _Z,
    None,
    "seq_mean",
    group_loss=Preference(),
    source="arXiv 2305.18290; on pairs of its own drawings as in the study of Janus-Pro, arXiv 2505.17017",
    notes="the best and the worst of each group are the pair; the reference is the model before training",
)
HI_GRPO = Preset(
    Hierarchical(0.5),
    _DAPO_CLIP,
    "token_mean_global",
    weights=(StepMeans(),),
    regularisers=(Kl(0.01, weighted=True),),
    source="AR3D-R1, arXiv 2512.10949",
    notes="each answer thinks and makes a coarse shape, then thinks and makes a fine one; rewards of six rendered "
    "views (maximum, sum); G = 8; the paper keeps the KL and decouples the clip; share and both constants inferred",
)

# --- agents with a critic: advantages come from genrl.objectives.tokens.token_credit, run over episodes

VL_DAC = Preset(
    CriticAdvantage("step", gamma=0.95, lam=0.95),
    Clip(low=0.1, high=0.1, drop_above=10.0),
    "seq_mean",
    transforms=(BatchNormalise(),),
    regularisers=(Kl(0.04), ValueLoss(0.5, 0.1)),
    warmup=2,
    source="VL-DAC, paper and code",
    notes="a value head on the detached state of the last prompt token; gamma .9 to .99 by environment; a row is one "
    "environment step",
)
POAD = Preset(
    CriticAdvantage("token", gamma=0.95, lam=0.95),
    Clip(),
    "token_mean",
    transforms=(BatchNormalise(),),
    regularisers=(EntropyBonus(0.01), ValueLoss(0.5, 0.2)),
    kl_stop=0.02,
    source="arXiv 2405.15821",
    notes="a value per token; an iteration's updates end where the mean of l_old - l exceeds kl_stop; weights of "
    "entropy and value are inferred",
)

# --- diffusion language models

BGPO = Preset(
    _Z,
    LinearBound(),
    "seq_mean",
    source="arXiv 2510.11683",
    notes="for a masked diffusion language model: log_prob [B, M] are M samples of the ELBO, run backwards one by one",
)
JUST_GRPO = Preset(
    _Z,
    Clip(),
    "seq_mean",
    source="JustGRPO, paper and code",
    notes="for a masked diffusion language model: the log-prob of position t with all later positions masked, run "
    "backwards position by position",
)

# --- systems whose own part is data, rewards or tools. KL k3 .01 as their trainers have it

_VERL_KL = Preset(_Z_VERL, Clip(), "token_mean", regularisers=(Kl(0.01),))
_SEQ_KL = Preset(_Z, Clip(), "seq_mean", regularisers=(Kl(0.01),))

CONAN = replace(
    _SEQ_KL,
    source="Conan",
    notes="multi-turn video; outcome + clue + action + .5 format; tool turns have mask 0; aggregation inferred",
)
VRAG_RL = replace(
    _VERL_KL,
    source="VRAG-RL",
    notes="search and crop in up to 4 turns; .7 judge + .1 rule + .2 NDCG; observations have mask 0",
)
TIME_MASTER = replace(_VERL_KL, source="TimeMaster", notes="plots of time series; .9 correct + .1 format; G = 5")
MED_VL_THINKER = replace(
    _VERL_KL, source="MedVLThinker", notes="prompts that the model always or never solves are dropped; G = 8"
)
PATHO_R1 = replace(_SEQ_KL, source="Patho-R1", notes="pretraining, SFT, then this or DAPO; aggregation inferred")
LMM_R1 = Preset(
    WhitenedReturns(baseline=True),
    Clip(),
    "seq_mean",
    reward_terms=(KlInReward(1e-3),),
    source="LMM-R1",
    notes="two stages, text only and then with pictures; G = 16",
)
K_FRAMES = replace(
    _SEQ_KL,
    source="K-frames, abstract",
    notes="reward: a frozen model answers from the chosen clips, and format; loss inferred",
)
JIGSAW_R1 = replace(_SEQ_KL, source="Jigsaw-R1", notes="shuffled patches; accuracy + .5 format; G = 8, curriculum")
SYN_GRPO = replace(
    GRPO,
    source="Syn-GRPO, abstract",
    notes="GRPO; what is new is data: pictures synthesised from the policy's descriptions, and a reward for diversity",
)

PRESETS: dict[str, Preset] = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "dapo": DAPO,
    "bnpo": BNPO,
    "gspo": GSPO,
    "gspo_token": GSPO_TOKEN,
    "luspo": LUSPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "vespo": VESPO,
    "rloo": RLOO,
    "reinforce_pp": REINFORCE_PP,
    "reinforce_pp_baseline": REINFORCE_PP_BASELINE,
    "gdpo": GDPO,
    "ngrpo": NGRPO,
    "dcpo": DCPO,
    "etr": ETR,
    "balanced": BALANCED,
    "forking_tokens": FORKING_TOKENS,
    "off_policy_mask": OFF_POLICY_MASK,
    "vppo": VPPO,
    "tw_grpo": TW_GRPO,
    "q_hawkeye": Q_HAWKEYE,
    "g2rpo": G2RPO,
    "grpo_care": GRPO_CARE,
    "stable_reinforce": STABLE_REINFORCE,
    "spine": SPINE,
    "para_grpo": PARA_GRPO,
    "reg_grpo": REG_GRPO,
    "real": REAL,
    "dmpo": DMPO,
    "dpo": DPO,
    "hi_grpo": HI_GRPO,
    "vl_dac": VL_DAC,
    "poad": POAD,
    "bgpo": BGPO,
    "just_grpo": JUST_GRPO,
    "conan": CONAN,
    "vrag_rl": VRAG_RL,
    "time_master": TIME_MASTER,
    "med_vl_thinker": MED_VL_THINKER,
    "patho_r1": PATHO_R1,
    "lmm_r1": LMM_R1,
    "k_frames": K_FRAMES,
    "jigsaw": JIGSAW_R1,
    "syn_grpo": SYN_GRPO,
}

MUSIC_RL = Preset(
    CriticAdvantage("token", gamma=1.0, lam=1.0),
    Reinforce(),
    "seq_sum",
    regularisers=(ValueLoss(1.0, clip=math.inf),),
    source="arXiv 2402.04229",
    notes="what `genrl check` shows of the method; music_rl.py trains it, with a KL over the whole vocabulary",
)

NOT_PRESETS: dict[str, str] = {
    "rl_vlm_f": "an offline method: a model compares two observations, a Bradley-Terry reward "
    "(objectives.adversarial.preference_loss) is fitted to its answers, and IQL learns from a labelled data set; no "
    "tokens are sampled from a policy",
    "music_rl": "token-level REINFORCE with a value per token and a KL over the whole vocabulary: "
    "objectives.audio_tokens.music_rl_loss reads log-softmax rows, not the log-prob of the chosen token; its trainer "
    "is music_rl.py",
}
