"""LeRobotDataset v3.0, read and written without the lerobot package.

meta/info.json                                   features, frames a second, how files are named and how large they are
meta/stats.json                                  statistics of every feature
meta/tasks.parquet                               the instructions and their numbers
meta/episodes/chunk-000/file-000.parquet         per episode: its length, its files, its statistics
data/chunk-000/file-000.parquet                  a row per frame, many episodes per file; pictures as PNG inside, or
videos/<camera>/chunk-000/file-000.mp4           as videos, many episodes per file (the extra `av`)
"""

from genrl.vla.data.lerobot_dataset.features import Episode, Limits
from genrl.vla.data.lerobot_dataset.read import Dataset, open_dataset
from genrl.vla.data.lerobot_dataset.write import write_dataset

__all__ = ["Dataset", "Episode", "Limits", "open_dataset", "write_dataset"]
