"""PaCo-GRPO trains as Flow-GRPO does; its settings say what is different."""

from genrl.diffusion.methods.flow_grpo.train import train as train
