"""The full DeepSeek V4.1 text model."""

from sparsity_lab.models.deepseek_v41.cache import Cache
from sparsity_lab.models.deepseek_v41.config import SIZES, DeepseekV41Config
from sparsity_lab.models.deepseek_v41.model import DeepseekV41Model
from sparsity_lab.models.deepseek_v41.observed import DeepseekV41, load, size_config

__all__ = ["SIZES", "Cache", "DeepseekV41", "DeepseekV41Config", "DeepseekV41Model", "load", "size_config"]
