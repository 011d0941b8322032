"""TensorBoard summaries other than scalars: texts, pictures, settings and a page of charts.

Built from TensorBoard's own protocol buffers, because torch.utils.tensorboard imports TensorFlow
if it is installed, which takes seconds, and its `add_hparams` creates a second run.
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

from common.console import escape
from configs.fields import settings_of
from configs.schema import Config

# The page of charts, in the order in which people look: title, tags. TensorBoard cuts off what it
# takes for outliers, and so most of a curve with few points. In one chart, the many points of the
# training loss keep the validation loss in view.
CHARTS = {
    "training loss and validation loss": ["train/loss", "val/loss"],
    "generalization gap": ["val/gap"],
    "learning rates": ["train/lr", "train/lr/.*"],
    "characters per second": ["train/tokens_per_sec"],
}
# The HParams tab sorts settings by name, and shows only the first five until the user selects more.
# A digit in front of the name puts these first; the displayed name omits it.
FIRST_HPARAMS = (
    "train.learning_rate",
    "train.muon_learning_rate",
    "model.n_layer",
    "model.n_embd",
    "model.block_size",
    "train.batch_size",
    "train.max_iters",
)
HPARAM_METRICS = ("val/loss", "val/bpc", "val/gap", "train/loss")
# type of a setting -> the tab's name for it; every other type is a number
HPARAM_TYPES = {bool: "bool", str: "string"}
DATA_TYPES = {"bool": "DATA_TYPE_BOOL", "string": "DATA_TYPE_STRING", "number": "DATA_TYPE_FLOAT64"}


def text(tag: str, markdown: str) -> Summary:
    """Make a summary for the Text tab."""
    summary_metadata = texts.create_summary_metadata("", "")
    return _tensor_summary(f"{tag}/text_summary", markdown.encode(), summary_metadata)


def code_block(lines: Iterable[str]) -> str:
    """Return Markdown that shows the lines, with control characters escaped except tabs.

    So no line can end the block: what follows a carriage return would be active Markdown.
    """
    escaped = [escape(line, keep="\t") for line in lines]
    return "".join(f"    {line}\n" for line in escaped)


def table(rows: dict[str, object], head: tuple[str, str]) -> str:
    """Return a Markdown table with two columns; characters special to Markdown are escaped."""
    cells = [(_escape_markdown(name), _escape_markdown(str(value))) for name, value in rows.items()]
    return "".join(f"| {name} | {value} |\n" for name, value in [head, ("---", "---"), *cells])


def picture(tag: str, image: Image) -> Summary:
    """Make a summary for the Images tab."""
    # colorspace 3 is RGB: the colors of the PNG's palette
    png = io.BytesIO()
    image.save(png, "PNG")
    encoded = Summary.Image(
        width=image.width, height=image.height, colorspace=3, encoded_image_string=png.getvalue()
    )
    return Summary(value=[Summary.Value(tag=tag, image=encoded)])


def charts() -> Summary:
    """Make the Custom Scalars page: losses, learning rates and speed."""
    page = Category(title="training")
    for title, tags in CHARTS.items():
        lines = MultilineChartContent(tag=[f"^{tag}$" for tag in tags])
        page.chart.append(Chart(title=title, multiline=lines))
    layout = Layout(category=[page]).SerializeToString()
    summary_metadata = custom_scalars.create_summary_metadata()
    return _tensor_summary(custom_scalars.CONFIG_SUMMARY_TAG, layout, summary_metadata)


def hparams(settings: dict[str, bool | int | float | str]) -> Summary:
    """Make the run's row in the HParams tab: its settings and the last value of HPARAM_METRICS."""
    start, infos = plugin_data_pb2.SessionStartInfo(), []
    for name, value in settings.items():
        first = FIRST_HPARAMS.index(name) + 1 if name in FIRST_HPARAMS else ""
        key = f"{first}{name}"
        hparam_type = HPARAM_TYPES.get(type(value), "number")
        field = f"{hparam_type}_value"

        # the tab has a check box per choice, so it needs them; a number has none
        choices = ()
        if hparam_type == "bool":
            choices = (False, True)
        if hparam_type == "string":
            choices = settings_of(Config)[name].metadata["choices"]
            if not choices:
                continue  # nothing to tick
        values = ListValue(values=[Value(**{field: choice}) for choice in choices])

        setattr(start.hparams[key], field, value)
        infos.append(
            HParamInfo(
                name=key,
                display_name=name,
                type=DATA_TYPES[hparam_type],
                domain_discrete=values if choices else None,
            )
        )

    # the same two parts that TensorBoard's own API writes: what there is, and this run's values
    metrics = [MetricInfo(name=MetricName(tag=tag)) for tag in HPARAM_METRICS]
    experiment = Experiment(hparam_infos=infos, metric_infos=metrics)
    parts = {
        metadata.EXPERIMENT_TAG: {"experiment": experiment},
        metadata.SESSION_START_INFO_TAG: {"session_start_info": start},
    }
    return Summary(value=[_hparams_value(tag, part) for tag, part in parts.items()])


# what the tabs Text, Custom Scalars and HParams read: bytes with a label that names the tab
def _tensor_summary(tag: str, content: bytes, summary_metadata: SummaryMetadata) -> Summary:
    tensor = TensorProto(dtype="DT_STRING", string_val=[content], tensor_shape=TensorShapeProto())
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=summary_metadata)])


def _hparams_value(tag: str, part: dict) -> Summary.Value:
    data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **part)
    plugin = SummaryMetadata.PluginData(
        plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString(deterministic=True)
    )
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin))


def _escape_markdown(words: str) -> str:
    return re.sub(r"([\\`*_{}\[\]()#+.!|>-])", r"\\\1", words)
