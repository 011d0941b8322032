"""The list of mutations fits the product: each replaces one text, and its tests are there."""

import pytest

from tests.mutations import MUTATIONS, ROOT, path_of


def test_there_are_sixty_mutations_and_every_package_has_some():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) == 60
    rooms = {mutation.file.rpartition("/")[0] for mutation in MUTATIONS}
    assert rooms == {"", "common", "configs", "data", "model", "page", "storage", "training"}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_replaces_one_text_of_the_product_and_names_its_tests(mutation):
    assert (ROOT / mutation.file).read_text("utf-8").count(mutation.old) == 1
    for module in mutation.tests.split():
        assert (ROOT / path_of(module)).exists()
