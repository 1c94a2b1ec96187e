"""The equations of marine navigation once more, for one world, in Python floats and loops."""

import math

RADIUS = 0.5 * math.sqrt(5.0**2 + 2.5**2)


def wrap(angle):
    """The angle in [-pi, pi)."""
    return (angle + math.pi) % (2 * math.pi) - math.pi


def water(x, y, cores):
    """Velocity of the water at a point."""
    total = [0.0, 0.0]
    for core_x, core_y, sign, gamma in cores:
        dx, dy = core_x - x, core_y - y
        d = math.hypot(dx, dy)
        if d == 0.0:
            continue
        speed = gamma * d / (2 * math.pi * 0.25) if d <= 0.5 else gamma / (2 * math.pi * d)
        # the unit vector to the core, turned by +-90 degrees
        total[0] += speed * (-dy / d) * sign
        total[1] += speed * (dx / d) * sign
    return total


class Robot:
    """One vehicle: position, heading, velocity relative to the water in the world frame, yaw rate, thrusts."""

    def __init__(self, x, y, heading, goal):
        self.x, self.y, self.heading, self.goal = x, y, heading, goal
        self.nx = self.ny = self.r = 0.0
        self.left = self.right = 0.0
        self.active = True

    def body(self, vector):
        """A world vector in the body frame."""
        c, s = math.cos(self.heading), math.sin(self.heading)
        return c * vector[0] + s * vector[1], -s * vector[0] + c * vector[1]

    def ground(self, cores):
        """Velocity over ground in the world frame."""
        wx, wy = water(self.x, self.y, cores)
        return self.nx + wx, self.ny + wy

    def substep(self, cores, dt=0.05):
        """Move, turn, then change the velocity by the forces."""
        vx, vy = self.ground(cores)
        self.x += vx * dt
        self.y += vy * dt
        self.heading += self.r * dt
        u, v = self.body((vx, vy))
        ur, vr = self.body((self.nx, self.ny))
        r, m, xdu = self.r, 400.0, -20.0
        tau = (self.left + self.right, 0.0, (self.left - self.right) * 1.25)
        rigid = (-m * r * v, m * r * u, 0.0)
        added = (0.0, xdu * ur * r, -xdu * ur * vr)
        damping = ((100 + 150 * abs(ur)) * ur, (100 + 150 * abs(vr)) * vr, (980 + 950 * abs(r)) * r)
        mass = (380.0, 400.0, 1430.0)
        au, av, ar = ((tau[i] - rigid[i] - added[i] - damping[i]) / mass[i] for i in range(3))
        ur, vr, self.r = ur + au * dt, vr + av * dt, r + ar * dt
        c, s = math.cos(self.heading), math.sin(self.heading)
        self.nx, self.ny = c * ur - s * vr, s * ur + c * vr


class World:
    """Robots, obstacles (x, y, radius) and cores (x, y, sign, strength); everything is perceived without noise."""

    def __init__(self, robots, obstacles=(), cores=()):
        self.robots, self.obstacles, self.cores = robots, list(obstacles), list(cores)

    def step(self, actions):
        """One action [-1, 1]^2 for each robot; returns (reward, event, turn) of each, zeros where one is gone."""
        started = [robot.active for robot in self.robots]
        before = [math.dist((robot.x, robot.y), robot.goal) for robot in self.robots]
        for robot, (left, right) in zip(self.robots, actions, strict=True):
            if robot.active:
                self._move(robot, left, right)
        results = []
        for index, robot in enumerate(self.robots):
            if not started[index]:
                results.append((0.0, 0, 0.0))
                continue
            event = self._event(index, started)
            turn = self.turn(index, started)
            reward = -0.1 + before[index] - math.dist((robot.x, robot.y), robot.goal) - 0.1 * turn
            results.append((reward + {0: 0.0, 1: 10.0, 2: -5.0}[event], event, turn))
        for robot, (_, event, _) in zip(self.robots, results, strict=True):
            robot.active = robot.active and event == 0
        return results

    def _move(self, robot, left, right):
        robot.left = min(1000.0, max(-500.0, robot.left + left * 1000 * 0.5))
        robot.right = min(1000.0, max(-500.0, robot.right + right * 1000 * 0.5))
        for _ in range(10):
            robot.substep(self.cores)
        robot.heading = wrap(robot.heading)

    def _event(self, index, started):
        robot = self.robots[index]
        for other, there in zip(self.robots, started, strict=True):
            if other is not robot and there and math.dist((robot.x, robot.y), (other.x, other.y)) <= 2 * RADIUS:
                return 2
        for x, y, radius in self.obstacles:
            if math.dist((robot.x, robot.y), (x, y)) <= radius + RADIUS:
                return 2
        return 1 if math.dist((robot.x, robot.y), robot.goal) <= 2.0 else 0

    def turn(self, index, present):
        """Radians by which the robot misses the course that the rules ask for."""
        ego = self.robots[index]
        others = [other for other, there in zip(self.robots, present, strict=True) if there and other is not ego]
        for other in sorted(others, key=lambda o: math.dist((ego.x, ego.y), (o.x, o.y))):
            if self._gives_way(ego, other):
                return max(0.0, self._missing(ego, other))
        return 0.0

    def _gives_way(self, ego, other):
        mine, theirs = ego.ground(self.cores), other.ground(self.cores)
        if math.hypot(*mine) < 0.5 or math.hypot(*theirs) < 0.5:
            return False
        if math.dist((ego.x, ego.y), (other.x, other.y)) > 20 + RADIUS:
            return False
        course = math.atan2(theirs[1], theirs[0])
        c, s = math.cos(course), math.sin(course)
        dx, dy = ego.x - other.x, ego.y - other.y
        x, y = c * dx + s * dy, -s * dx + c * dy
        angle = math.atan2(-s * mine[0] + c * mine[1], c * mine[0] + s * mine[1])
        if 0 <= x <= 17 and abs(y) <= 4.5 and abs(angle) > 3 * math.pi / 4:
            return True
        beside = -9 <= x <= 12 and -17 <= y <= 0 and not y + 7 > (-7 / 12) * (x - 12)
        return beside and math.pi / 4 <= angle <= 3 * math.pi / 4

    def _missing(self, ego, other):
        mine = ego.ground(self.cores)
        dx, dy = other.x - ego.x, other.y - ego.y
        d, base = math.hypot(dx, dy), RADIUS + 1.0
        add = math.asin(min(1.0, base / d)) + math.atan2(RADIUS, math.sqrt(max(0.0, d * d - base * base)))
        return wrap(math.atan2(dy, dx) + add - math.atan2(mine[1], mine[0]))

    def observation(self, index):
        """The 37 numbers of a robot."""
        ego = self.robots[index]
        u, v = ego.body(ego.ground(self.cores))
        goal = ego.body((ego.goal[0] - ego.x, ego.goal[1] - ego.y))
        own = [goal[0] / 55, goal[1] / 55, u / 3.4, v / 3.4, ego.r, ego.left / 1000, ego.right / 1000]
        seen = []
        things = [(o.x, o.y, *o.ground(self.cores), RADIUS) for o in self.robots if o is not ego and o.active]
        things += [(x, y, 0.0, 0.0, radius) for x, y, radius in self.obstacles]
        for x, y, vx, vy, radius in things:
            px, py = ego.body((x - ego.x, y - ego.y))
            if math.hypot(px, py) <= 20 + radius:
                u, v = ego.body((vx, vy))
                seen.append((math.hypot(px, py) - radius, [px / 20, py / 20, u / 3.4, v / 3.4, radius]))
        seen = [features for _, features in sorted(seen, key=lambda pair: pair[0])][:5]
        flags = [1.0] * len(seen) + [0.0] * (5 - len(seen))
        padded = seen + [[0.0] * 5] * (5 - len(seen))
        return own + [value for features in padded for value in features] + flags
