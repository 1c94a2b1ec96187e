"""Envs by name: what each form of a name makes, and what is said of names and arguments that cannot be used."""

import importlib.metadata
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
from named_envs import Batched, Corridor, Line, Reacher

from torchrl_perf import envs
from torchrl_perf.collectors.vector_envs import vector_envs
from torchrl_perf.envs import registry
from torchrl_perf.envs.registry import find, make, register
from torchrl_perf.trainers import PPOConfig

HERE = Path(__file__).parent
FILE = HERE / "named_envs.py"


def where():
    return torch.device("cpu")


def made(name, num_envs=4, **arguments):
    return make(name, num_envs, device=where, arguments=arguments)


@pytest.fixture
def unregistered(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})


class TestForms:
    def test_a_task_of_the_package(self):
        found = made("CartPole", max_episode_steps=7)
        assert isinstance(found.env, envs.CartPole)
        assert found.env.batch_size == (4,)
        assert (found.env.max_episode_steps, found.label, found.single) == (7, "CartPole", None)

    @pytest.mark.parametrize("name", ["CartPole-v1", "gym:CartPole-v1"])
    def test_an_id_of_gymnasium(self, name):
        found = made(name, max_episode_steps=3)
        env = found.single()
        assert env.spec.id == "CartPole-v1"
        assert (env.spec.max_episode_steps, found.label, found.env) == (3, "CartPole-v1", None)

    def test_a_module_of_an_id_is_gymnasium_s_own_form(self, tmp_path, monkeypatch):
        (tmp_path / "naming.py").write_text(
            "import gymnasium\ngymnasium.register('Named-v0', entry_point='named_envs:Corridor')\n"
        )
        monkeypatch.chdir(tmp_path)
        try:
            assert type(made("naming:Named-v0").single().unwrapped) is Corridor
        finally:
            del gymnasium.registry["Named-v0"]

    @pytest.mark.parametrize("name", ["named_envs:Corridor", f"{FILE}:Corridor", f"{FILE}:make_corridor"])
    def test_a_gymnasium_env_of_a_user(self, name):
        found = made(name, length=9)
        assert (found.label, found.single().length) == ("Corridor", 9)

    @pytest.mark.parametrize("name", ["named_envs:Line", "named_envs:make_line"])
    def test_a_device_env_of_a_user(self, name):
        found = made(name)
        assert (type(found.env).__name__, found.label, found.env.batch_size) == ("Line", "Line", (4,))

    def test_arguments_of_a_device_env(self):
        assert made("named_envs:Line", speed=0.5).env.speed == 0.5

    def test_a_torchrl_env_without_a_batch_is_made_n_times(self):
        found = made("named_envs:Single", goal=0.0)
        assert found.env.batch_size == (4,)
        assert found.label == "Single"
        assert found.env.rollout(3)["next", "reward"].shape == (4, 3, 1)
        found.env.close(raise_if_closed=False)

    def test_a_torchrl_env_with_a_batch_size(self):
        found = made("named_envs:Batched")
        assert type(found.env) is Batched
        assert found.env.batch_size == (4,)

    def test_a_vector_env_of_a_user(self):
        found = made("named_envs:make_vector")
        assert (found.label, found.vector(6).num_envs) == ("Corridor", 6)

    def test_an_own_file_may_be_named_like_another_module(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", list(sys.path))  # the file's folder joins it, where later processes would look
        (tmp_path / "json.py").write_text("import helper_of_json\nfrom named_envs import Corridor\n")
        (tmp_path / "helper_of_json.py").write_text("")
        before = sys.modules["json"]
        assert made(f"{tmp_path / 'json.py'}:Corridor").label == "Corridor"
        assert sys.modules["json"] is before

    def test_a_limit_for_an_env_that_has_none(self):
        env = made("named_envs:Corridor", max_episode_steps=2).single()
        env.reset(seed=0)
        assert not env.step(0)[3]
        assert env.step(0)[3]

    def test_atari(self):
        pytest.importorskip("ale_py")
        found = made("ALE/Pong-v5", num_envs=2)
        pongs = found.vector(2)
        assert (pongs.single_observation_space.shape, found.frames, found.label) == ((4, 84, 84), 4, "ALE-Pong-v5")
        pongs.close()

    def test_vmas(self):
        pytest.importorskip("vmas")
        found = made("vmas:navigation", num_envs=6, n_agents=3)
        assert found.env.batch_size == (6,)
        with pytest.raises(ValueError, match=r"num_envs: expected a multiple of the 3 agents.*received 7.*num_envs=6"):
            made("vmas:navigation", num_envs=7, n_agents=3)
        with pytest.raises(ValueError, match=r"scenario of VMAS, received 'navigaton'.*vmas:navigation, the nearest"):
            made("vmas:navigaton")


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("Cartpol", r"received 'Cartpol'\. Remedy: --env CartPole, the nearest"),
            (
                "HalfCheeta-v5",
                r"Gymnasium's, received 'HalfCheeta-v5'.*Remedy: --env HalfCheetah-v5, the nearest",
            ),
            ("gym:CartPool-v1", r"received 'CartPool-v1'.*--env CartPole-v1, the nearest"),
            ("no_module:Env", r"there is no module no_module"),
            (
                "named_envs:Corrido",
                r"function of named_envs, received 'Corrido'\. Remedy: named_envs:Corridor",
            ),
            ("nowhere.py:Env", r"expected a file, received 'nowhere\.py:Env'"),
            ("named_envs:Nothing", r"expected a DeviceEnv .*received the class named_envs\.Nothing\. Remedy: the name"),
            ("named_envs:make_nothing", r"received make_nothing, which returned builtins\.int\. Remedy: "),
            ("named_envs:not a name", r"expected module\.path:Class or file\.py:function, received"),
            (":Corridor", r"expected module\.path:Class or file\.py:function, received"),
        ],
    )
    def test_names(self, name, words):
        with pytest.raises(ValueError, match=words) as caught:
            made(name)
        assert str(caught.value).startswith("env: expected ")

    def test_a_value_that_cannot_be_called(self):
        with pytest.raises(ValueError, match=r"expected a DeviceEnv .*received 5"):
            made("named_envs:number")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("import no_such_package\n", r"ModuleNotFoundError: No module named 'no_such_package' .*line 1"),
            ("x = 1\nx.y\n", r"AttributeError: 'int' object has no attribute 'y' .*line 2"),
            ("def f(:\n", r"SyntaxError.*line 1"),
        ],
    )
    def test_a_module_that_does_not_import(self, tmp_path, monkeypatch, text, words):
        (tmp_path / "broken_env.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        for name in ("broken_env:Env", "broken_env.py:Env"):
            with pytest.raises(ValueError, match=words) as caught:
                made(name)
            assert f"expected a module that imports, received '{name}'" in str(caught.value)
            assert "broken_env" not in sys.modules

    @pytest.mark.parametrize("name", ["named_envs:Corridor", "named_envs:make_corridor", "named_envs:Line"])
    def test_arguments_that_an_env_does_not_take(self, name):
        with pytest.raises(ValueError, match=r"env_args: expected arguments of \w+\(.*\), received 'lenght'\. Rem"):
            made(name, lenght=3)

    def test_arguments_that_an_env_needs(self):
        with pytest.raises(ValueError, match=r"env_args: expected goal, which Needy needs, received \{\}.*goal=value"):
            made("named_envs:Needy")
        assert made("named_envs:Needy", goal=2).label == "Needy"

    def test_arguments_that_an_id_does_not_take(self):
        with pytest.raises(ValueError, match=r"env_args: expected arguments of CartPole-v1, received \{'lenght': 3\}"):
            made("CartPole-v1", lenght=3)

    def test_an_absent_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "vmas", None)
        with pytest.raises(ImportError, match=r"expected the package vmas.*Remedy: pip install 'torchrl_perf\[marl\]'"):
            find("vmas:navigation")

    def test_an_env_that_lacks_its_package(self, unregistered):
        def absent():
            import no_such_package  # noqa: F401

        register("Needy", absent, needs="pip install needed")
        with pytest.raises(ImportError, match=r"that Needy needs.*no_such_package.*Remedy: pip install needed"):
            made("Needy")


class TestRegister:
    def test_a_name_with_settings(self, unregistered):
        entry = register("Hall", Corridor, about="A corridor.", settings={"ppo": {"num_envs": 4, "num_steps": 8}})
        assert find("Hall") is entry
        assert made("Hall", length=3).label == "Hall"
        config = PPOConfig(env="Hall")
        assert (config.num_envs, config.num_steps, config.env) == (4, 8, "Hall")
        assert PPOConfig(env="Hall", num_envs=16).num_envs == 16

    def test_a_module_that_registers_the_name(self, unregistered, tmp_path, monkeypatch):
        (tmp_path / "halls.py").write_text(
            "from named_envs import Corridor\nfrom torchrl_perf.envs import register\nregister('Hall', Corridor)\n"
        )
        monkeypatch.chdir(tmp_path)
        assert find("halls:Hall").maker is Corridor
        with pytest.raises(ValueError, match=r"class or function of halls, received 'Hal'"):
            find("halls:Hal")

    def test_the_last_registration_counts(self, unregistered):
        register("Hall", Corridor)
        register("Hall", Reacher)
        assert find("Hall").maker is Reacher

    @pytest.mark.parametrize("name", ["CartPole", "cart-pole", "two words", "", "a:b"])
    def test_names_that_are_refused(self, unregistered, name):
        with pytest.raises(ValueError, match=r"name: expected letters.*received .*Remedy"):
            register(name, Corridor)

    def test_what_cannot_be_called(self, unregistered):
        with pytest.raises(TypeError, match=r"maker: expected a class or function.*received Corridor"):
            register("Hall", Corridor())

    def test_entry_points(self, monkeypatch):
        point = importlib.metadata.EntryPoint("Offered", "named_envs:Line", registry.ENTRY_POINTS)
        broken = importlib.metadata.EntryPoint("Broken", "named_envs:Absent", registry.ENTRY_POINTS)
        monkeypatch.setattr(registry.metadata, "entry_points", lambda group: [point, broken])
        found = made("Offered")
        assert type(found.env) is Line
        assert found.label == "Offered"
        with pytest.raises(ValueError, match=r"entry point Broken = named_envs:Absent to load, received Attr"):
            made("Broken")


class TestVectorEnvs:
    def test_groups_and_processes(self):
        groups = vector_envs(made("named_envs:Corridor"), 4, groups=2, processes=True)
        try:
            assert [(type(each).__name__, each.num_envs) for each in groups] == [("AsyncVectorEnv", 2)] * 2
        finally:
            for each in groups:
                each.close()

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"env_groups: expected a divisor of num_envs = 4, received 3"):
            vector_envs(made("named_envs:Corridor"), 4, groups=3)
        with pytest.raises(ValueError, match=r"env_processes: expected False for Corridor, a vector env"):
            vector_envs(made("named_envs:make_vector"), 4, processes=True)
        with pytest.raises(ValueError, match=r"num_envs: expected 1 vector envs of 4 envs, received \[3\]"):
            vector_envs(made("named_envs:make_three"), 4)
