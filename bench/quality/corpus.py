"""Text to measure on: all but the last kind is in none of the tiny hybrid's training data (its README lists them).

English is docstrings and Python is source of torch and numpy, which every installation of this engine has. The model
saw Python's own library and documentation: that is the last kind, and says what the engine does with text that the
model knows. Chinese is a page written for this file.
"""

import importlib
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType

ENGLISH = (
    "torch.nn.functional",
    "torch.nn.modules.conv",
    "torch.nn.modules.loss",
    "torch.nn.modules.rnn",
    "torch.nn.modules.activation",
    "torch.nn.modules.transformer",
    "torch.optim.lr_scheduler",
    "torch.utils.data.dataloader",
    "torch.distributions.distribution",
    "numpy.linalg",
    "numpy.polynomial.polynomial",
    "numpy.lib",
)
PYTHON = (
    "torch.optim.adamw",
    "torch.optim.sgd",
    "torch.utils.data.sampler",
    "torch.nn.modules.container",
    "torch.distributions.normal",
    "torch.distributions.kl",
    "numpy.ma.core",
    "numpy.polynomial.polyutils",
)
LIBRARY = ("argparse", "asyncio.events", "decimal", "difflib", "json.decoder", "logging", "statistics", "textwrap")
CHINESE = (
    "老街的尽头有一家修理收音机的小店，店主姓陈，今年七十多岁。他每天早上八点开门，先把门口的落叶扫干净，再泡一壶茶，"
    "然后坐在窗边的工作台前。台上放着放大镜、电烙铁和几十个装满零件的小盒子。附近的孩子放学以后喜欢来看他干活，问他为什么"
    "一个木头盒子会唱歌。他总是笑着回答：空气里到处都是声音，只是你们的耳朵听不见，收音机替你们听。\n\n"
    "去年冬天，一位从外地来的年轻人带来一台很旧的收音机，说这是祖父留下的，已经三十年没有响过。陈师傅打开后盖，发现里面的"
    "线路完好，只有一只电容坏了。他没有收钱，只请年轻人讲一讲祖父的故事。两个小时以后，收音机里传出了天气预报：明天多云，"
    "最高气温五度。年轻人听着听着，眼睛就红了。\n\n"
    "现在很少有人再用收音机，小店的生意也越来越少。有人劝陈师傅把房子租出去，改成咖啡馆。他摇摇头说，修好一件东西，比买一件"
    "新的更让人高兴。只要还有一个人推开这扇门，他就会一直坐在那里。春天的时候，学校请他去给学生上课，他带了一包零件，教每个"
    "孩子自己动手做一台最简单的收音机。那天下午，教室里先是一片安静，接着忽然响起了二十多个不同的声音，大家都笑了。\n"
)


@cache
def english() -> str:
    return "\n\n".join(dict.fromkeys(text for name in ENGLISH for text in docstrings(importlib.import_module(name))))


def source(names: Sequence[str]) -> str:
    return "\n\n".join(inspect.getsource(importlib.import_module(name)) for name in names)


def texts() -> dict[str, str]:
    """Text by kind."""
    return {
        "English": english(),
        "Python": source(PYTHON),
        "Chinese": CHINESE,
        "Python library (seen)": source(LIBRARY),
    }


def docstrings(module: ModuleType) -> Iterator[str]:
    """Of the module, and of its public functions and classes."""
    for item in [module, *(value for name, value in sorted(vars(module).items()) if not name.startswith("_"))]:
        if (item is module or callable(item)) and (text := inspect.getdoc(item)):
            yield text
