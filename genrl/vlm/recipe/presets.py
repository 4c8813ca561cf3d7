"""Every published method as settings: `PRESETS["vppo"]`.

A preset holds the loss. Data, rewards and prompts of a system are named in its `notes`; "inferred" there marks a
constant that its source does not give and that is ours. `genrl check` prints the one of a run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from genrl.vlm.recipe.advantages import (
    CriticAdvantage,
    GreedyBaseline,
    GroupAdvantage,
    Hierarchical,
    LeaveOneOut,
    LengthWeighted,
    NormaliseThenSum,
    PrefixTree,
    RankQuantiles,
    SemiOnline,
    Signed,
    SmoothedAdvantage,
    TokenStatistics,
    TurnLeaveOneOut,
    VirtualReward,
    WhitenedGroups,
    WhitenedPopulation,
    WhitenedReturns,
)
from genrl.vlm.recipe.losses import (
    Classification,
    EntropyBand,
    EntropyBonus,
    EntropyPenalty,
    Kl,
    Perception,
    Preference,
    Regression,
    RightAnswers,
    ValueLoss,
)
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.shaping import (
    Asymmetry,
    BatchNormalise,
    ConsistencyBonus,
    InformativeGroups,
    KlInReward,
    ReferenceProbability,
    SigmaFilter,
    SpreadFilter,
    TrajectoryDependency,
    Uncertainty,
)
from genrl.vlm.recipe.surrogates import (
    Cispo,
    Clip,
    CumulativeMask,
    DynamicClip,
    EntropyAdaptive,
    GeometricMean,
    KlCov,
    LinearBound,
    LogClamp,
    LowProbability,
    ProbabilityMask,
    Quadratic,
    Reinforce,
    RowClip,
    Sapo,
    SequenceClip,
    SequenceTokenClip,
    Vespo,
)
from genrl.vlm.recipe.weights import (
    ClipCov,
    Divergence,
    EngineMismatch,
    OffPolicyMask,
    StepMeans,
    TopDependency,
    TopEntropy,
    TopEntropyOfRow,
)

_Z = GroupAdvantage()  # TRL and the trainers made from R1-V: std + 1e-4
_Z_VERL = GroupAdvantage(eps=1e-6)  # verl and EasyR1
_DAPO_CLIP = Clip(low=0.2, high=0.28)
_GRPO = Preset(_Z, Clip(), "seq_mean", regularisers=(Kl(beta=0.04),), source="arXiv 2402.03300")
_REINFORCE_PP = Preset(
    WhitenedReturns(),
    Clip(),
    "seq_mean",
    reward_terms=(KlInReward(beta=0.01),),
    source="arXiv 2501.03262",
    notes="beta is OpenRLHF's default; no groups are needed",
)
_POAD = Preset(
    CriticAdvantage(level="token", gamma=0.95, lam=0.95),
    Clip(),
    "token_mean",
    transforms=(BatchNormalise(),),
    regularisers=(EntropyBonus(coefficient=0.01), ValueLoss(coefficient=0.5, clip=0.2)),
    kl_stop=0.02,
    source="arXiv 2405.15821",
    notes="a value per token; an iteration's updates end where the mean of l_old - l exceeds kl_stop; weights of "
    "entropy and value are inferred",
)
# of trainers that have a KL k3 of .01
_VERL_KL = Preset(_Z_VERL, Clip(), "token_mean", regularisers=(Kl(beta=0.01),))
_SEQ_KL = Preset(_Z, Clip(), "seq_mean", regularisers=(Kl(beta=0.01),))

PRESETS: dict[str, Preset] = {
    # --- methods of language models that carry over to pictures unchanged
    "grpo": _GRPO,
    "dr_grpo": Preset(
        GroupAdvantage(scale="none"),
        Clip(),
        "const",
        source="arXiv 2503.20783",
        notes="the divisor is the longest completion allowed",
    ),
    "dapo": Preset(
        _Z,
        _DAPO_CLIP,
        "token_mean_global",
        source="arXiv 2503.14476",
        notes="groups without spread are dropped and others sampled; overlong rows are masked or get OverlongPenalty",
    ),
    "bnpo": Preset(_Z, Clip(), "token_mean", source="TRL loss_type bnpo"),
    "gspo": Preset(_Z, SequenceClip(), "seq_mean", source="arXiv 2507.18071", notes="4 updates per rollout"),
    "gspo_token": Preset(_Z, SequenceTokenClip(), "seq_mean", source="arXiv 2507.18071"),
    "luspo": Preset(_Z, SequenceClip(), "seq_sum", source="TRL loss_type luspo"),
    "cispo": Preset(_Z, Cispo(), "token_mean_global", source="arXiv 2506.13585"),
    "sapo": Preset(_Z, Sapo(), "seq_mean", source="arXiv 2511.20347"),
    "vespo": Preset(_Z, Vespo(), "token_mean_global", source="TRL loss_type vespo"),
    "rloo": Preset(
        LeaveOneOut(),
        Reinforce(),
        "seq_mean",
        reward_terms=(KlInReward(beta=0.05),),
        source="arXiv 2402.14740",
        notes="beta is TRL's default",
    ),
    "reinforce_pp": _REINFORCE_PP,
    "reinforce_pp_baseline": replace(_REINFORCE_PP, advantage=WhitenedGroups()),
    "gdpo": Preset(
        NormaliseThenSum(),
        Clip(),
        "seq_mean",
        source="arXiv 2601.05242; TRL normalize_then_sum",
        notes="weights are those of the rewards",
    ),
    "ngrpo": Preset(
        VirtualReward(),
        Clip(low=0.16, high=0.24),
        "token_mean",
        source="arXiv 2509.18851 and code",
        notes="groups that are all correct are dropped; rewards are at most `best`",
    ),
    "dcpo": Preset(
        SmoothedAdvantage(),
        DynamicClip(),
        "token_mean_global",
        source="arXiv 2509.02333 and code",
        notes="statistics by prompt are part of a checkpoint; the scripts have widths .2 and .28; the mean over all "
        "tokens is the code's, the paper's sum of the answers' means grows with their number",
    ),
    "forking_tokens": Preset(
        _Z, _DAPO_CLIP, "token_mean_global", weights=(TopEntropy(share=0.2),), source="arXiv 2506.01939"
    ),
    "off_policy_mask": Preset(
        _Z,
        Clip(),
        "seq_mean",
        weights=(OffPolicyMask(high=0.5),),
        source="DeepSeek-V3.2; TRL",
        notes="high inferred",
    ),
    "gmpo": Preset(
        _Z, GeometricMean(), "seq_mean", source="arXiv 2507.20673", notes="several updates per rollout; no KL"
    ),
    "clip_cov": Preset(
        _Z_VERL,
        Clip(low=1.0, high=1.0),
        "token_mean_global",
        weights=(ClipCov(),),
        source="arXiv 2505.22617 and code",
        notes="share, band and the ratio's bounds are the code's; tokens chosen once per rollout: ours",
    ),
    "kl_cov": Preset(
        _Z_VERL,
        KlCov(),
        "token_mean_global",
        source="arXiv 2505.22617 and code",
        notes="several updates per rollout; share and weight are the code's; tokens chosen once per rollout: ours",
    ),
    "gpg": Preset(
        GroupAdvantage(scale="none"),
        Reinforce(),
        "token_mean_global",
        transforms=(InformativeGroups(),),
        source="arXiv 2504.02546 and the authors' ablation",
        notes="no ratio, no KL: one update per rollout",
    ),
    "opo": Preset(
        LengthWeighted(),
        Reinforce(),
        "seq_sum",
        source="arXiv 2505.23585",
        notes="exactly on policy: one update per rollout; no KL; the sum over tokens is inferred from the derivation",
    ),
    "remax": Preset(
        GreedyBaseline(),
        Reinforce(),
        "seq_sum",
        source="arXiv 2310.10505",
        notes="one update per rollout; the paper has one answer per question, and a KL in the reward",
    ),
    "nsr": Preset(
        Signed(),
        Clip(),
        "token_mean_global",
        source="arXiv 2506.01347 and code",
        notes="wrong answers alone are learnt from; right = first reward >= evaluation.right_at; no groups are needed",
    ),
    "w_reinforce": Preset(
        Signed(pays=(0.1, -1.0)),
        Clip(),
        "token_mean_global",
        source="arXiv 2506.01347 and code",
        notes="as nsr, with right answers at a tenth; the paper's PSR is {name: signed, pays: [1, 0]}",
    ),
    "a_grae": Preset(
        _Z_VERL,
        Clip(),
        "token_mean_global",
        transforms=(Asymmetry(),),
        source="arXiv 2602.05548 and code",
        notes="alpha .5 for geometry and medicine; the released script anneals its switch away from the value that "
        "turns this on, so it never runs what its paper says",
    ),
    "lp_reg": Preset(
        _Z_VERL,
        LowProbability(),
        "token_mean_global",
        source="arXiv 2510.03222 and code",
        notes="G = 8, no KL; the rarest tokens are chosen once per rollout by the old policy: ours, the code chooses "
        "in each micro-batch; share .005 for 32B",
    ),
    "hapo": Preset(
        TokenStatistics(),
        EntropyAdaptive(),
        "token_mean_global",
        source="HAPO, code",
        notes="entropies below the quantile count down to -1, as intended: the released code divides them by a "
        "negative number, so that its lower branch never acts; the sampling temperature does not follow entropy here; "
        "sample deviation of the tokens inferred",
    ),
    "tempo": replace(
        _GRPO,
        advantage=PrefixTree(),
        source="arXiv 2509.18314, abstract and a review",
        notes="GRPO and the credit of branches, both over the deviation of the rewards, as a review of the paper says; "
        "weight of the two, clip and KL inferred",
    ),
    "pacs": Preset(
        _Z,
        None,
        "seq_mean",
        group_loss=RightAnswers(),
        source="arXiv 2509.02522 and code",
        notes="the advantage is not used; the code sums padding too, here the mask applies",
    ),
    "dppo": Preset(
        GroupAdvantage(scale="none"),
        ProbabilityMask(),
        "token_mean_global",
        source="UniRL, code",
        notes="of tokens: no relation of the robots' diffusion policy optimisation",
    ),
    "cppo": Preset(GroupAdvantage(scale="none"), CumulativeMask(), "token_mean_global", source="UniRL, code"),
    "drpo": Preset(
        GroupAdvantage(scale="none"), Quadratic(), "token_mean_global", source="arXiv 2606.09821; UniRL, code"
    ),
    # --- vision-language systems whose loss is their own
    "vppo": Preset(
        _Z_VERL,
        Clip(low=0.2, high=0.28, dual=3.0),
        "token_mean",
        transforms=(TrajectoryDependency(),),
        weights=(TopDependency(share=0.4),),
        regularisers=(EntropyPenalty(coefficient=0.06),),
        source="VPPO, paper and code",
        notes="masked picture: patches of 14 pixels black with probability .5; groups filtered; aggregation as coded, "
        "the paper has seq_mean; penalty .12 for 8B",
    ),
    "tw_grpo": Preset(
        _Z,
        Clip(),
        "token_mean",
        weights=(Divergence(),),
        source="TW-GRPO, paper and code",
        notes="with a KL: Kl(weighted=True); multi-choice soft accuracy as reward, questions inverted to multi-choice",
    ),
    "q_hawkeye": Preset(
        _Z,
        Clip(),
        "seq_mean",
        transforms=(Uncertainty(),),
        regularisers=(Kl(beta=0.04), Perception()),
        source="Q-Hawkeye, paper and code",
        notes="its weight falls to 0 over 5 epochs (objectives.matching.cosine); G = 4; score_reward + .8 format",
    ),
    "g2rpo": Preset(
        RankQuantiles(),
        Clip(),
        "seq_mean",
        regularisers=(EntropyBand(coefficient=0.01, band=(0.2, 0.9)),),
        source="OpenVLThinkerV2",
        notes="band and its coefficient inferred (they are per task); without the paper's reward of length; ranks are "
        "within the group",
    ),
    "grpo_care": Preset(
        _Z,
        Clip(),
        "seq_mean",
        reward_terms=(ConsistencyBonus(),),
        source="arXiv 2506.16141",
        notes="on policy, one update per rollout; reference is the policy's moving average, decay .995, every 10 "
        "steps; without the margin of .01 for general video",
    ),
    "rlpr": Preset(
        _Z,
        Clip(low=0.2, high=0.27),
        "token_mean",
        reward_terms=(ReferenceProbability(),),
        transforms=(SpreadFilter(), InformativeGroups()),
        source="arXiv 2506.18254",
        notes="no verifier: rewards are of the form alone, .1; G = 8; its filter by spread begins after 6 to 11 steps "
        "by script, here 10; groups that are left out are no part of the mean, as there",
    ),
    "stable_reinforce": Preset(
        WhitenedPopulation(),
        LogClamp(),
        "seq_mean",
        reward_terms=(KlInReward(beta=1e-3),),
        transforms=(SigmaFilter(limit=3.0),),
        source="arXiv 2505.02835",
        notes="R1-Reward; reward accuracy (1 + .5 consistency) + .5 format, consistency from a judge; G = 1",
    ),
    "spine": Preset(
        _Z,
        Clip(),
        "seq_mean",
        weights=(TopEntropyOfRow(share=0.2),),
        regularisers=(EntropyBand(coefficient=0.01, band=(0.25, 0.75), bounds="quantile"),),
        source="abstract",
        notes="reward: majority vote of the group, no labels; share, quantiles and coefficient inferred",
    ),
    "ttrl": Preset(
        _Z,
        Clip(),
        "seq_mean",
        source="arXiv 2504.16084",
        notes="GRPO on the reward of a majority vote, without labels: the control of spine; its code has 64 votes and "
        "trains on 32 of them, here a group votes and is trained on; clip and no KL inferred",
    ),
    "para_grpo": Preset(
        _Z,
        Clip(),
        "token_mean",
        transforms=(BatchNormalise(),),
        weights=(EngineMismatch(level="token", mode="mask", high=5.0),),
        regularisers=(Kl(beta=0.01),),
        source="ParaVT",
        notes="forced prefix `<think>` with mask 0; a random frame budget per prompt; rewards accuracy + format + tool",
    ),
    "reg_grpo": Preset(
        _Z,
        None,
        "seq_mean",
        regularisers=(Kl(beta=0.04),),
        group_loss=Regression(),
        source="arXiv 2506.07464",
        notes="DeepVideo-R1; two updates per rollout or more, with gradient clipping; augmentation by difficulty; eps "
        "and beta inferred",
    ),
    "real": Preset(_Z, None, "seq_mean", group_loss=Classification(), source="REAL; group rule of ms-swift"),
    "dpo": Preset(
        _Z,
        None,
        "seq_mean",
        group_loss=Preference(),
        source="arXiv 2305.18290; on pairs of its own drawings as in the study of Janus-Pro, arXiv 2505.17017",
        notes="the best and the worst of each group are the pair; the reference is the model before training",
    ),
    "hi_grpo": Preset(
        Hierarchical(),
        _DAPO_CLIP,
        "token_mean_global",
        weights=(StepMeans(),),
        regularisers=(Kl(beta=0.01, weighted=True),),
        output="voxels",
        source="AR3D-R1, arXiv 2512.10949",
        notes="each answer thinks and makes a coarse shape, then thinks and makes a fine one; rewards of six rendered "
        "views (maximum, sum); G = 8; the paper keeps the KL and decouples the clip; share inferred, beta "
        "and the clip from the released training of one step",
    ),
    # --- agents with a critic: advantages come from genrl.objectives.token_credit, run over episodes
    "vl_dac": Preset(
        CriticAdvantage(level="step", gamma=0.95, lam=0.95),
        RowClip(low=0.1, high=0.1),
        "seq_mean",
        transforms=(BatchNormalise(),),
        regularisers=(Kl(beta=0.04), ValueLoss(coefficient=0.5, clip=0.1)),
        warmup=2,
        source="VL-DAC, paper and code",
        notes="a value head on the detached state of the last prompt token; gamma .9 to .99 by environment; a row is "
        "one environment step",
    ),
    "poad": _POAD,
    "token_ppo": replace(
        _POAD,
        advantage=CriticAdvantage(level="every_token", gamma=0.95, lam=0.95),
        notes="POAD's control (NTPO in the paper): gamma at every token, so that long answers are discounted more",
    ),
    "ma_rlhf": replace(
        _POAD,
        advantage=CriticAdvantage(level="token", gamma=0.95, lam=0.95, macro=5),
        source="arXiv 2410.02743 and code",
        notes="POAD over macro actions of five tokens; the paper has one answer per question, gamma 1, and a KL in the "
        "reward; its macro actions by perplexity, by parses and of random length are not here",
    ),
    # --- agents that learn from an expert's walks
    "ui_s1": Preset(
        SemiOnline(),
        Clip(),
        "token_mean",
        regularisers=(Kl(beta=1e-4),),
        source="arXiv 2509.11543 and code",
        notes="environment trajectories, history of its own, expert's action without a thought in place of a wrong "
        "one; G = 8; rounds inferred",
    ),
    # --- agents whose turns are paid, in groups of episodes
    "trloo": Preset(
        TurnLeaveOneOut(),
        Clip(low=0.2, high=0.28, dual=3.0),
        "seq_sum",
        source="arXiv 2602.05885 and code",
        notes="Dr. Kernel: up to 3 turns, G = 16, no KL; clip and sums of tokens as coded, where they are averaged "
        "over turns; a row is an episode here, and the mean over episodes",
    ),
    # --- diffusion language models
    "bgpo": Preset(
        _Z,
        LinearBound(),
        "seq_mean",
        output="masked_text",
        source="arXiv 2510.11683",
        notes="for a masked diffusion language model: log_prob [B, M] are M samples of the ELBO, run backwards one by "
        "one",
    ),
    "just_grpo": Preset(
        _Z,
        Clip(),
        "seq_mean",
        output="masked_text",
        source="JustGRPO, paper and code",
        notes="for a masked diffusion language model: the log-prob of position t with all later positions masked, run "
        "backwards position by position; the code also trains the places after the end, and divides by all places and "
        "by the answers whose advantage is not 0",
    ),
    # --- systems whose own part is data, rewards or tools
    "conan": replace(
        _SEQ_KL,
        source="Conan",
        notes="multi-turn video; outcome + clue + action + .5 format; tool turns have mask 0; aggregation inferred",
    ),
    "vrag_rl": replace(
        _VERL_KL,
        source="VRAG-RL",
        notes="search and crop in up to 4 turns; .7 judge + .1 rule + .2 NDCG; observations have mask 0",
    ),
    "time_master": replace(_VERL_KL, source="TimeMaster", notes="plots of time series; .9 correct + .1 format; G = 5"),
    "med_vl_thinker": replace(
        _VERL_KL, source="MedVLThinker", notes="prompts that the model always or never solves are dropped; G = 8"
    ),
    "patho_r1": replace(_SEQ_KL, source="Patho-R1", notes="pretraining, SFT, then this or DAPO; aggregation inferred"),
    "lmm_r1": Preset(
        WhitenedGroups(),
        Clip(),
        "seq_mean",
        reward_terms=(KlInReward(beta=1e-3),),
        source="LMM-R1",
        notes="two stages, text only and then with pictures; G = 16",
    ),
    "k_frames": replace(
        _SEQ_KL,
        source="K-frames, abstract",
        notes="reward: a frozen model answers from the chosen clips, and format; loss inferred",
    ),
    "jigsaw": replace(_SEQ_KL, source="Jigsaw-R1", notes="shuffled patches; accuracy + .5 format; G = 8, curriculum"),
    "syn_grpo": replace(
        _GRPO,
        source="Syn-GRPO, abstract",
        notes="GRPO; what is new is data: pictures synthesised from the policy's descriptions, and a reward for "
        "diversity",
    ),
}

if TYPE_CHECKING:
    PresetName = str
else:  # what a configuration may say are the rows above, and nothing else lists them
    PresetName = Literal[tuple(PRESETS)]
