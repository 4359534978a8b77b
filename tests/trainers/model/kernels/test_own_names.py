"""Names that are replaced for one model."""

from types import ModuleType

from memtrain.trainers.model.kernels.own_names import unchanged, with_names

TIMES = 2


def test_what_is_put_into_a_module_is_taken_out_again():
    module = ModuleType("family")
    module.__dict__["Norm"] = int
    with unchanged([module]):
        module.__dict__["Norm"] = float
        assert vars(module)["Norm"] is float
    assert vars(module)["Norm"] is int


def test_a_function_has_another_name_for_itself_alone():
    def scaled(x, *, more=1):
        return TIMES * x + more

    made = with_names(scaled, {"TIMES": 10})
    assert (made(3), made(3, more=0), scaled(3)) == (31, 30, 7)
