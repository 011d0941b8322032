"""What TensorBoard shows beside curves, as it wants to have it: texts, pictures, settings and a
page of charts.
"""

import io
import re
from collections.abc import Iterable

from google.protobuf.struct_pb2 import ListValue, Value
from PIL.Image import Image
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.custom_scalar import metadata as custom_scalars
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MultilineChartContent,
)
from tensorboard.plugins.hparams import metadata, plugin_data_pb2
from tensorboard.plugins.hparams.api_pb2 import Experiment, HParamInfo, MetricInfo, MetricName
from tensorboard.plugins.text import metadata as texts

from configs.fields import settings_of
from configs.schema import Config

CHARTS = {
    "loss": ["train/loss", "val/loss", "val/train_loss"],
    "rate": ["train/lr", "train/lr/.*"],
    "speed": ["train/tokens_per_sec"],
}
FINAL = (
    "val/loss",
    "val/bpc",
    "val/gap",
    "train/loss",
)  # what the table of settings shows of each run
KINDS = {bool: "bool", str: "string"}  # of settings; the others are numbers
TYPES = {"bool": "DATA_TYPE_BOOL", "string": "DATA_TYPE_STRING", "number": "DATA_TYPE_FLOAT64"}


def text(tag: str, markdown: str) -> Summary:
    return _words(f"{tag}/text_summary", markdown.encode(), texts.create_summary_metadata("", ""))


def verbatim(lines: Iterable[str]) -> str:
    """Markdown that shows the lines as they are."""
    return "".join(f"    {line}\n" for line in lines)


def table(rows: dict[str, object], head: tuple[str, str]) -> str:
    """Markdown of a table in two columns, whatever characters are in it."""
    cells = [
        head,
        ("---", "---"),
        *((_plain(name), _plain(str(value))) for name, value in rows.items()),
    ]
    return "".join(f"| {name} | {value} |\n" for name, value in cells)


def picture(tag: str, image: Image) -> Summary:
    png = io.BytesIO()
    image.save(png, "PNG")
    drawn = Summary.Image(
        width=image.width, height=image.height, colorspace=3, encoded_image_string=png.getvalue()
    )
    return Summary(value=[Summary.Value(tag=tag, image=drawn)])


def charts() -> Summary:
    """One page with loss, rate and speed, under Custom Scalars."""
    lines = {
        title: MultilineChartContent(tag=[f"^{tag}$" for tag in tags])
        for title, tags in CHARTS.items()
    }
    page = Category(
        title="training",
        chart=[Chart(title=title, multiline=line) for title, line in lines.items()],
    )
    layout = Layout(category=[page]).SerializeToString()
    return _words(
        custom_scalars.CONFIG_SUMMARY_TAG, layout, custom_scalars.create_summary_metadata()
    )


def settings(values: dict[str, bool | int | float | str]) -> Summary:
    """The run's row in the HParams tab: its settings, and the last point of the curves in FINAL.

    `SummaryWriter.add_hparams` makes a folder for them, which shows as a run of its own; these lie
    in the run's file.
    """
    start, infos = plugin_data_pb2.SessionStartInfo(), []
    for name, value in values.items():
        kind = KINDS.get(type(value), "number")
        domain = {
            "bool": (False, True),
            "string": settings_of(Config)[name].metadata["choices"],
        }.get(kind)
        if kind == "string" and not domain:
            # the tab has boxes to tick for texts, and knows none for those that may be anything
            continue
        setattr(start.hparams[name], f"{kind}_value", value)
        among = (
            ListValue(values=[Value(**{f"{kind}_value": each}) for each in domain])
            if domain
            else None
        )
        infos.append(HParamInfo(name=name, type=TYPES[kind], domain_discrete=among))
    experiment = Experiment(
        hparam_infos=infos, metric_infos=[MetricInfo(name=MetricName(tag=tag)) for tag in FINAL]
    )
    about = {
        metadata.EXPERIMENT_TAG: {"experiment": experiment},
        metadata.SESSION_START_INFO_TAG: {"session_start_info": start},
    }
    return Summary(value=[_about_run(tag, part) for tag, part in about.items()])


def _words(tag: str, content: bytes, about: SummaryMetadata) -> Summary:
    """A text for a plugin, without torch.utils.tensorboard, which loads TensorFlow for seconds
    where that is there.
    """
    tensor = TensorProto(dtype="DT_STRING", string_val=[content], tensor_shape=TensorShapeProto())
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=about)])


def _about_run(tag: str, part: dict) -> Summary.Value:
    content = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **part)
    plugin = SummaryMetadata.PluginData(
        plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString(deterministic=True)
    )
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin))


def _plain(words: str) -> str:
    return re.sub(r"([\\`*_{}\[\]()#+.!|>-])", r"\\\1", words)
