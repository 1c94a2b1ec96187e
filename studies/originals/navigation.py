"""Navigation as marine had it: one env at a time, one robot after the other, in NumPy.

The equations, in the same order, of :class:`torchrl_perf.envs.marine.MarineNavigation`; x is forward, y starboard, yaw
turns clockwise.
"""

import math
from dataclasses import dataclass, field

import numpy as np

DT, SUBSTEPS, LENGTH = 0.05, 10, 55.0
RADIUS, OBSTACLE_RADIUS, GOAL_RADIUS, RANGE = 0.5 * math.hypot(5.0, 2.5), 1.0, 2.0, 20.0
MASS, ADDED_X = 400.0, -20.0
INERTIA = np.array([380.0, 400.0, 1430.0])
LINEAR, QUADRATIC = np.array([100.0, 100.0, 980.0]), np.array([150.0, 150.0, 950.0])
ARM, CORE_RADIUS = 1.25, 0.5
MOST_OBJECTS = 5
SELF_SCALE = np.array([1 / 55, 1 / 55, 1 / 3.4, 1 / 3.4, 1.0, 1 / 1000, 1 / 1000])
OBJECT_SCALE = np.array([1 / 20, 1 / 20, 1 / 3.4, 1 / 3.4, 1.0])
LONGEST, TIME_COST, GOAL_REWARD, COLLISION_REWARD, COLREGS_COST = 1000, -0.1, 10.0, -5.0, 0.1


@dataclass
class Robot:
    """One vehicle: pose, velocity through the water in world axes with its yaw rate, thrust of both sides, goal."""

    position: np.ndarray
    heading: float
    goal: np.ndarray
    velocity: np.ndarray = field(default_factory=lambda: np.zeros(3))
    ground: np.ndarray = field(default_factory=lambda: np.zeros(2))
    thrust: np.ndarray = field(default_factory=lambda: np.zeros(2))
    active: bool = True

    def to_body(self, vector: np.ndarray) -> np.ndarray:
        """A vector of the world in the robot's axes."""
        cos, sin = math.cos(self.heading), math.sin(self.heading)
        return np.array([[cos, sin], [-sin, cos]]) @ vector

    def to_world(self, vector: np.ndarray) -> np.ndarray:
        """A vector of the robot's axes in the world."""
        cos, sin = math.cos(self.heading), math.sin(self.heading)
        return np.array([[cos, -sin], [sin, cos]]) @ vector

    def substep(self, current: np.ndarray, action: np.ndarray | None) -> None:
        """0.05 s; the action, a rate of thrust, is applied in the first of ten."""
        ground = self.velocity[:2] + current
        self.position = self.position + ground * DT
        self.heading = wrapped(self.heading + self.velocity[2] * DT)
        if action is not None:
            self.thrust = np.clip(self.thrust + action * 1000.0 * DT * SUBSTEPS, -500.0, 1000.0)
        u, v = self.to_body(ground)
        relative = np.append(self.to_body(self.velocity[:2]), self.velocity[2])
        u_r, v_r, r = relative
        left, right = self.thrust
        force = np.array([left + right, 0.0, (left - right) * ARM])
        coriolis = np.array([-MASS * r * v, MASS * r * u, 0.0])
        added = np.array([0.0, ADDED_X * u_r * r, -ADDED_X * u_r * v_r])
        damping = (LINEAR + QUADRATIC * np.abs(relative)) * relative
        relative = relative + (force - coriolis - added - damping) / INERTIA * DT
        self.velocity = np.append(self.to_world(relative[:2]), relative[2])
        self.ground = self.velocity[:2] + current


def wrapped(angle: float) -> float:
    """An angle in [-pi, pi)."""
    return (angle + math.pi) % (2 * math.pi) - math.pi


def current_at(position: np.ndarray, cores: np.ndarray) -> np.ndarray:
    """The sum over vortices ``[C, 4]`` of x, y, sense of rotation and circulation."""
    total = np.zeros(2)
    for x, y, sign, circulation in cores:
        towards = np.array([x, y]) - position
        distance = math.hypot(*towards)
        if circulation == 0.0 or distance == 0.0:
            continue
        inside = distance <= CORE_RADIUS
        speed = circulation * (distance / CORE_RADIUS**2 if inside else 1.0 / distance) / (2 * math.pi)
        unit = towards / distance
        total += speed * sign * np.array([-unit[1], unit[0]])
    return total


def random_world(robots: int, obstacles: int, distance: float) -> tuple[list[Robot], np.ndarray]:
    """Robots with goals and obstacles, each drawn again until it fits those before it."""
    starts: list[np.ndarray] = []
    goals: list[np.ndarray] = []
    while len(starts) < robots:
        start, goal = np.random.uniform(2.0, 53.0, (2, 2))
        fits = math.dist(start, goal) >= distance
        fits = fits and all(math.dist(start, other) >= 10.0 for other in starts)
        if fits and all(math.dist(goal, other) >= 10.0 for other in goals):
            starts.append(start)
            goals.append(goal)
    blocks: list[np.ndarray] = []
    while len(blocks) < obstacles:
        place = np.random.uniform(2.0, 53.0, 2)
        if all(math.dist(place, other[:2]) >= 8.0 for other in [*starts, *goals, *blocks]):
            blocks.append(np.append(place, OBSTACLE_RADIUS))
    headings = np.random.uniform(-math.pi, math.pi, robots)
    made = [Robot(start, heading, goal) for start, heading, goal in zip(starts, headings, goals, strict=True)]
    return made, np.array(blocks).reshape(-1, 3)


def turn_angle(own: Robot, others: list[Robot]) -> float:
    """Radians by which a robot should have turned for the nearest one that it has to give way to (COLREGs); or 0."""
    if math.hypot(*own.ground) < 0.5:
        return 0.0
    near = sorted(others, key=lambda other: math.dist(own.position, other.position))
    for other in near:
        distance = math.dist(own.position, other.position)
        if distance > RANGE + RADIUS or math.hypot(*other.ground) < 0.5 or not _gives_way(own, other):
            continue
        base = RADIUS + 1.0
        bearing = math.atan2(*(other.position - own.position)[::-1])
        tangent = math.sqrt(max(0.0, distance**2 - base**2))
        desired = bearing + math.asin(min(1.0, base / max(distance, 1e-9))) + math.atan2(RADIUS, tangent)
        return max(0.0, wrapped(desired - math.atan2(own.ground[1], own.ground[0])))
    return 0.0


def _gives_way(own: Robot, other: Robot) -> bool:
    course = math.atan2(other.ground[1], other.ground[0])
    cos, sin = math.cos(course), math.sin(course)
    turn = np.array([[cos, sin], [-sin, cos]])
    x, y = turn @ (own.position - other.position)
    vx, vy = turn @ own.ground
    angle = math.atan2(vy, vx)
    if 0 <= x <= 17 and abs(y) <= 4.5 and abs(angle) > 0.75 * math.pi:
        return True
    crosses = -9 <= x <= 12 and -17 <= y <= 0 and y + 7 <= (-7 / 12) * (x - 12)
    return crosses and 0.25 * math.pi <= angle <= 0.75 * math.pi


class NavigationLoop:
    """One env.

    Args:
        robots: its vehicles.
        obstacles: ``[O, 3]`` x, y, radius.
        cores: ``[C, 4]``, see :func:`current_at`.
        noise: whether perceived objects have errors.
    """

    def __init__(self, robots: list[Robot], obstacles: np.ndarray, cores: np.ndarray, *, noise: bool = True) -> None:
        self.robots, self.obstacles, self.cores, self.noise = robots, obstacles, cores, noise
        self.steps = 0
        for robot in robots:
            robot.ground = robot.velocity[:2] + current_at(robot.position, cores)

    def step(self, actions: np.ndarray) -> tuple[list[np.ndarray], list[float], list[bool], list[str]]:
        """Half a second.

        Args:
            actions: ``[R, 2]`` in [-1, 1].

        Returns:
            For each robot the observation ``[37]``, the reward, whether it ended, and why ("goal", "collision", "").
        """
        self.steps += 1
        began = [robot.active for robot in self.robots]
        before = [math.dist(robot.position, robot.goal) for robot in self.robots]
        for robot, action in zip(self.robots, actions, strict=True):
            if not robot.active:
                continue
            for number in range(SUBSTEPS):
                robot.substep(current_at(robot.position, self.cores), action if number == 0 else None)
            robot.ground = robot.velocity[:2] + current_at(robot.position, self.cores)
        events = [self._event(index) if began[index] else "" for index in range(len(self.robots))]
        rewards = []
        for index, robot in enumerate(self.robots):
            if not began[index]:
                rewards.append(0.0)
                continue
            others = [other for i, other in enumerate(self.robots) if i != index and began[i]]
            reward = TIME_COST + before[index] - math.dist(robot.position, robot.goal)
            reward -= COLREGS_COST * turn_angle(robot, others)
            reward += {"goal": GOAL_REWARD, "collision": COLLISION_REWARD}.get(events[index], 0.0)
            rewards.append(reward)
        for robot, event in zip(self.robots, events, strict=True):
            robot.active = robot.active and not event
        done = [not robot.active or self.steps >= LONGEST for robot in self.robots]
        return self.observe(), rewards, done, events

    def observe(self) -> list[np.ndarray]:
        """The observation ``[37]`` of each robot."""
        return [self._observe(robot) for robot in self.robots]

    def _event(self, index: int) -> str:
        robot = self.robots[index]
        for other_index, other in enumerate(self.robots):
            if other_index == index or not other.active:
                continue
            if math.dist(robot.position, other.position) <= 2 * RADIUS:
                return "collision"
        for x, y, radius in self.obstacles:
            if math.dist(robot.position, (x, y)) <= RADIUS + radius:
                return "collision"
        return "goal" if math.dist(robot.position, robot.goal) <= GOAL_RADIUS else ""

    def _observe(self, robot: Robot) -> np.ndarray:
        own = np.concatenate(
            [
                robot.to_body(robot.goal - robot.position),
                robot.to_body(robot.ground),
                robot.velocity[2:],
                robot.thrust,
            ]
        )
        found = []
        things = [
            (other.position, other.ground, RADIUS) for other in self.robots if other is not robot and other.active
        ]
        things += [(row[:2], np.zeros(2), row[2]) for row in self.obstacles]
        for place, speed, size in things:
            position, velocity = robot.to_body(place - robot.position), robot.to_body(speed)
            radius = size
            if self.noise:
                position = position + np.random.normal(0.0, 0.05, 2)
                velocity = velocity + np.random.normal(0.0, 0.05, 2)
                radius = size * (0.8 + 0.2 * np.random.vonmises(0.0, 1.0) / math.pi)
            distance = math.hypot(*position) - radius
            if distance <= RANGE:
                found.append((distance, np.concatenate([position, velocity, [radius]])))
        found.sort(key=lambda pair: pair[0])
        objects, flags = np.zeros((MOST_OBJECTS, 5)), np.zeros(MOST_OBJECTS)
        for number, (_, features) in enumerate(found[:MOST_OBJECTS]):
            objects[number], flags[number] = features * OBJECT_SCALE, 1.0
        return np.concatenate([own * SELF_SCALE, objects.ravel(), flags]).astype(np.float32)
